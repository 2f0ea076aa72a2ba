"""Fingerprints of models and files, used as cache keys."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ClearheadError


def weights_digest(model: Any) -> str:
    """A hash of the configuration and of what `parameters_digest` reads, 16 hex digits."""
    return _digest(model, model.config.to_json_string())


def parameters_digest(model: Any) -> str:
    """A hash of each parameter's name, sum and sum of squares, 16 hex digits."""
    return _digest(model, "")


def _digest(model: Any, start: str) -> str:
    digest = hashlib.sha256(start.encode())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = parameter.double()
            digest.update(f"{name} {wide.sum():.12e} {wide.square().sum():.12e}".encode())
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """A hash of a file's bytes, as 12 hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def check_files(task: str, files: Sequence[str], example: str) -> None:
    """Refuse an empty list of files, and two files of one name: tables name them so."""
    if not files:
        raise ClearheadError(f"{task} needs files: for example --{task}.files {example}")
    names = Counter(Path(file).name for file in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ClearheadError(f"two files are called {twice[0]}: tables name them so; rename one")
