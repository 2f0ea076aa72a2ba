"""Data sets of the Hugging Face hub: streamed once into the cache, then a file like any other.

The passes over a corpus (hash, sample, tokenise) and every later run then read the local copy:
a run repeats without a network. Delete the copy to fetch a newer version of the data set.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clearhead.data.config import DataConfig
from clearhead.data.readers import text_of
from clearhead.data.shards import building
from clearhead.errors import ClearheadError

PREFIX = "hf:"


def is_hub(spec: str) -> bool:
    """True if a spec names a data set of the hub."""
    return spec.startswith(PREFIX)


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """Part `hf:name[:config][#split]` into name, config (or None) and split ("train" if absent).

    Raises:
        ClearheadError: where there is no name.
    """
    body, _, split = spec.removeprefix(PREFIX).partition("#")
    name, _, config = body.partition(":")
    if not name:
        raise ClearheadError(f"data {spec!r}: no name; write hf:NAME, hf:NAME:CONFIG#SPLIT")
    return name, config or None, split or "train"


def download(spec: str, config: DataConfig, progress: Callable[[str], None]) -> Path:
    """Return the local .jsonl copy (field "text") of a data set, streaming it down if it is new.

    Raises:
        ClearheadError: where the data set cannot be had, or its rows lack the text field.
    """
    wanted = json.dumps([spec, config.text_field, config.limit])
    root = config.cache_folder / "hub"
    path = root / f"{hashlib.sha256(wanted.encode()).hexdigest()[:32]}.jsonl"
    if path.exists():
        return path
    rows = _stream(spec)
    progress(f"{spec}: downloading")
    with building(root) as folder:
        copy = folder / "rows"
        with open(copy, "w", encoding="ascii") as file:
            _copy(rows, spec, config, lambda text: file.write(json.dumps({"text": text}) + "\n"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(copy, path)  # only a whole copy ever has this name
    return path


def download_rows(spec: str, cache: Path, progress: Callable[[str], None]) -> Path:
    """Return the local .jsonl copy of a data set with all its fields, streaming it down if new.

    A class is written by its name where the data set names its classes.

    Raises:
        ClearheadError: where the data set cannot be had.
    """
    root = cache / "hub"
    path = root / f"{hashlib.sha256(json.dumps([spec, 'rows']).encode()).hexdigest()[:32]}.jsonl"
    if path.exists():
        return path
    rows = _stream(spec)
    progress(f"{spec}: downloading")
    features = getattr(rows, "features", None) or {}
    named = {field: kind.names for field, kind in features.items() if hasattr(kind, "names")}
    with building(root) as folder:
        copy = folder / "rows"
        with open(copy, "w", encoding="ascii") as file:
            for row in _rows(rows, spec):
                for field, names in named.items():
                    if isinstance(row[field], int) and 0 <= row[field] < len(names):
                        row = {**row, field: names[row[field]]}
                file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(copy, path)  # only a whole copy ever has this name
    return path


def _rows(rows: Any, spec: str) -> Iterator[Any]:
    try:
        yield from rows
    except Exception as error:  # the network, a format, a script: whatever datasets raises
        raise _failed(spec, error) from error


def _copy(rows: Any, spec: str, config: DataConfig, write: Callable[[str], object]) -> None:
    taken = 0
    for number, row in enumerate(_rows(rows, spec), start=1):
        text = text_of(row, config.text_field, f"data {spec!r}, row {number}")
        write(text)
        taken += len(text.encode("utf-8"))
        if config.limit is not None and taken >= config.limit:
            return


def _stream(spec: str) -> Any:
    name, subset, split = parse_hub(spec)
    try:
        import datasets
    except ImportError as error:
        raise ClearheadError(f"data {spec!r} needs datasets: pip install datasets") from error
    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # as above: its errors share no base class
        raise _failed(spec, error) from error


def _failed(spec: str, error: Exception) -> ClearheadError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ClearheadError(f"data {spec!r} cannot be had from the hub: {reason}")
