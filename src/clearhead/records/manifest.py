"""Manifests: a JSON file with the SHA-256 of each file of a folder and of itself."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import sha256_of, write_json

FILE = "manifest.json"
# A checkpoint's own, which also says how far the training was.
CHECKPOINT_FILE = "trainer.json"


def seal(folder: Path, record: dict[str, Any] | None = None, *, name: str = FILE) -> None:
    """Write the manifest of a complete folder with the values of `record`, replacing any."""
    hashes = {file: sha256_of(folder / file) for file in _files(folder) if file != name}
    # Through JSON and back, so that the digest is of what a reader will see.
    sealed = json.loads(json.dumps({**(record or {}), "files": hashes}))
    write_json(folder / name, {**sealed, "sha256": _digest(sealed)})


def verify(folder: Path, *, name: str = FILE, advice: str) -> dict[str, Any]:
    """Check every file of a sealed folder; return what its manifest records. Prose (*.md, LICENSE)
    and hidden files may have been added; of others a ClearheadError names the first changed one."""
    changed = "is missing, cut short or changed"
    try:
        record: dict[str, Any] = json.loads((folder / name).read_bytes())
        intact = record.pop("sha256") == _digest(record)
        hashes = dict(record["files"])
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise ClearheadError(f"{folder / name} {changed}: {advice}")
    with ThreadPoolExecutor() as pool:  # weights and optimizer state are files of gigabytes
        paths = [folder / file for file in hashes]
        digests = pool.map(lambda path: path.is_file() and sha256_of(path), paths)
        for (file, expected), digest in zip(hashes.items(), digests, strict=True):
            if digest != expected:
                raise ClearheadError(f"{folder / file} {changed}: {advice}")
    for file in _files(folder):
        if file not in hashes and file != name:
            late = "was not there when the folder was written"
            raise ClearheadError(f"{folder / file} {late}: {advice}")
    return record


def verify_model(folder: Path) -> None:
    """Check the files of a saved model or checkpoint; those of other libraries have no manifest."""
    for name in (FILE, CHECKPOINT_FILE):
        if os.path.lexists(folder / name):
            advice = f"restore {folder}, or, where the change is meant, delete {folder / name}"
            verify(folder, name=name, advice=advice)


def _files(folder: Path) -> list[str]:
    """Files that a library may read as part of a model, by their path in the folder."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if not any(part.startswith(".") for part in name.parts)
        and name.suffix != ".md"
        and name.stem != "LICENSE"
    )


def _digest(record: dict[str, Any]) -> str:
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "backslashreplace")).hexdigest()
