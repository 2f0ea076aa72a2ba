"""Data sets of the Hugging Face hub, read as a stream of one revision.

Rows are streamed into tokens or memory, and no copy of them is stored. The revision of the first
use is recorded in the cache, so that later runs read the same rows. A run on a tokenised corpus
needs no network; labelled texts and questions are read again by every command. Delete `hub/` in
the cache to get the newest revisions.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import read_json, write_json

PREFIX = "hf:"


def is_hub(spec: str) -> bool:
    """True if a spec names a data set of the hub."""
    return spec.startswith(PREFIX)


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """Parse `hf:name[:config][#split]` into name, config or None, and split, by default "train"."""
    body, _, split = spec.removeprefix(PREFIX).partition("#")
    name, _, config = body.partition(":")
    if not name:
        raise ClearheadError(f"data {spec!r}: no name; write hf:NAME, hf:NAME:CONFIG#SPLIT")
    return name, config or None, split or "train"


def pinned_revision(spec: str, cache: Path, progress: Callable[[str], None]) -> str | None:
    """The revision of a data set at its first use; the hub is queried only then.

    None if the spec names a local folder instead of a data set.
    """
    name, _, _ = parse_hub(spec)
    if Path(name).is_dir():
        return None
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


def rows(spec: str, revision: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for every row of a data set, in order.

    A class is given by its name where the data set names its classes.
    """
    import datasets

    name, subset, split = parse_hub(spec)
    try:
        stream = datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision)
        features = getattr(stream, "features", None) or {}
        named = {field: kind.names for field, kind in features.items() if hasattr(kind, "names")}
        for number, row in enumerate(stream, start=1):
            classes = {
                field: names[row[field]]
                for field, names in named.items()
                if isinstance(row[field], int) and 0 <= row[field] < len(names)
            }
            yield f"{spec}, row {number}", {**row, **classes}
    except Exception as error:  # the network, a format, a script: whatever datasets raises
        raise _failed(spec, error) from error


def _failed(spec: str, error: Exception) -> ClearheadError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ClearheadError(f"data {spec!r} cannot be loaded from the hub: {reason}")
