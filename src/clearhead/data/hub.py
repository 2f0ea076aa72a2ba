"""Data sets of the Hugging Face hub, read as a stream of one revision.

Text goes from the network into tokens and is kept nowhere. The revision is that of the first use,
kept in the cache: later runs have the same text, and none of them needs a network once it is
tokenised. Delete `hub/` in the cache for the newest revisions.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clearhead.data.readers import text_of
from clearhead.data.shards import building
from clearhead.errors import ClearheadError
from clearhead.records.files import read_json, write_json

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


def local_folder(spec: str) -> Path | None:
    """The folder that a spec names in place of a data set of the hub, if it does."""
    path = Path(parse_hub(spec)[0])
    return path if path.is_dir() else None


def pinned_revision(spec: str, cache: Path, progress: Callable[[str], None]) -> str:
    """The revision of a data set at its first use; the hub is asked for it then only.

    Raises:
        ClearheadError: where the hub does not answer, or has no such data set.
    """
    name, _, _ = parse_hub(spec)
    path = cache / "hub" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    if path.exists():
        known = read_json(path, "delete it to ask the hub again")
        if isinstance(revision := known.get("revision"), str):
            return revision
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name).sha
    except Exception as error:  # the network, or the hub's answer: its errors share no base class
        raise _failed(spec, error) from error
    write_json(path, {"data set": name, "revision": revision})
    progress(f"{spec}: pinned to revision {revision}")
    return str(revision)


def texts(spec: str, revision: str | None, text_field: str) -> Iterator[str]:
    """Yield the texts of a data set in order, as they come from the hub.

    Raises:
        ClearheadError: where the data set cannot be read, or its rows lack the text field.
    """
    for number, row in enumerate(_rows(_stream(spec, revision), spec), start=1):
        yield text_of(row, text_field, f"data {spec!r}, row {number}")


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


def _stream(spec: str, revision: str | None = None) -> Any:
    name, subset, split = parse_hub(spec)
    try:
        import datasets
    except ImportError as error:
        raise ClearheadError(f"data {spec!r} needs datasets: pip install datasets") from error
    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision)
    except Exception as error:  # as above
        raise _failed(spec, error) from error


def _failed(spec: str, error: Exception) -> ClearheadError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ClearheadError(f"data {spec!r} cannot be had from the hub: {reason}")
