"""Values computed from files, reused while no file's size, times and inode changed.

An edit changes at least one of these, so a file is read again only after an edit.
"""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import write_text
from clearhead.records.identity import digest_of

# A file that changed so recently may change again within one tick of the file system's clock, and
# keep its time. Two seconds is the coarsest clock in use.
_RECENT_NS = 2_000_000_000


class StatCache:
    """A value in a JSON file, valid for the files as they were when this was constructed.

    Args:
        path: of that file; where it cannot be written no value is kept.
        files: that the value is computed from; None: from more than files, so that none is kept.
        key: JSON of everything else that decides the value.
    """

    def __init__(self, path: Path, files: Iterable[Path] | None, key: Any) -> None:
        self._path, self._key = path, key
        self._files = None if files is None else list(files)
        self._state = self._now()

    def read(self) -> Any:
        """The value; None where there is none, or a file or the key changed."""
        state, value = self._stored()
        return value if state == self._state is not None else None

    def last(self) -> Any:
        """The value that was written last, whatever changed since; None where there is none."""
        return self._stored()[1]

    def write(self, value: Any) -> None:
        """Keep a value, unless a file changed meanwhile or may still change unnoticed."""
        if self._state is None or self._state != self._now() or self._recent():
            return
        content = [self._state, value, digest_of([self._state, value])]
        with suppress(ClearheadError):
            write_text(self._path, json.dumps(content))

    def forget(self) -> None:
        """Drop the value."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _stored(self) -> tuple[str | None, Any]:
        try:
            state, value, digest = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError, TypeError):
            return None, None
        return (state, value) if digest == digest_of([state, value]) else (None, None)

    def _now(self) -> str | None:
        """A digest of the key and of the files' sizes, times and inodes; None if one is missing."""
        if self._files is None:
            return None
        try:
            return digest_of([self._key, list(map(_stat, self._files))])
        except OSError:
            return None

    def _recent(self) -> bool:
        newest = max((path.stat().st_mtime_ns for path in self._files or ()), default=0)
        return time.time_ns() - newest < _RECENT_NS


def _stat(path: Path) -> Sequence[int]:
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_size, *times, found.st_ino
