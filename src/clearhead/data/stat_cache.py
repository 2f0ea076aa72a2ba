"""Values computed from files, reused while no file's size, times and inode changed."""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import write_text
from clearhead.records.identity import digest_of

# A file that changed so recently may change again within one tick of the file system's clock, and
# keep its time. Two seconds is the coarsest clock in use.
_RECENT_NS = 2_000_000_000


def state_of(files: Iterable[Path], key: Any) -> str | None:
    """A digest of `key`, JSON, and of the files' sizes, times and inodes.

    None where a file is missing, or so new that it may change unnoticed.
    """
    try:
        stats = [path.stat() for path in files]
    except OSError:
        return None
    if time.time_ns() - max((one.st_mtime_ns for one in stats), default=0) < _RECENT_NS:
        return None
    return digest_of(
        [key, [[one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino] for one in stats]]
    )


def recall(path: Path, state: str | None) -> Any:
    """The value stored for a state; None if there is none."""
    try:
        known, value, digest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, TypeError):
        return None
    return (
        value
        if state is not None and [state, digest_of([state, value])] == [known, digest]
        else None
    )


def keep(path: Path, state: str | None, value: Any) -> None:
    """Store a JSON value for a state, unless the state is None or the folder is not writable."""
    if state is not None:
        with suppress(ClearheadError):
            write_text(path, json.dumps([state, value, digest_of([state, value])]))
