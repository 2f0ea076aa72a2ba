"""One process at a time in a run folder or a file of records.

A lock is a file that names its owner and that the kernel frees when the owner dies (flock); a
forked child never holds it. At its release the file is removed.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from clearhead.errors import ClearheadError
from clearhead.records.files import remove_leftovers, require_regular

_PATIENCE = 0.2  # seconds, within which another process may be removing its lock


class Lock:
    """A lock that this process holds."""

    def __init__(self, held: Path, place: Path) -> None:
        self._held, self._place, self._pid = held, place, os.getpid()
        self._lock = FileLock(place, fallback_to_soft=False)
        name, owner = f"process {self._pid} on {socket.gethostname()} since ", ""
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout:
            with contextlib.suppress(OSError):
                owner = place.read_text(errors="replace")[:200]
            owner = f"{owner or 'another process'}: wait for it or stop it, or choose another place"
            if owner.startswith(name):
                owner = "this process already: choose another place"
            raise ClearheadError(f"{held} is in use by {owner}") from None
        place.write_text(name + datetime.now(UTC).isoformat(timespec="seconds"))
        self._file = place.stat()

    def check(self) -> None:
        """Raise a ClearheadError where the lock is gone: what it guards was deleted or moved."""
        if not self._is_there():
            raise ClearheadError(
                f"{self._held} was deleted, moved or replaced while this process was writing to "
                "it: put it back and give the same command again, or choose another place"
            )

    def release(self) -> None:
        """Remove the lock, unless this is a forked child, or the lock is no longer there."""
        if self._pid == os.getpid():
            if self._is_there():
                self._place.unlink()
            self._lock.release()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._place.stat(), self._file)
        except OSError:
            return False


@contextmanager
def hold_folder(folder: Path) -> Iterator[Lock]:
    """Hold a folder, made where it is missing, and removed at the end if it is still empty.

    What a killed owner was still writing directly under it is removed.

    Raises:
        ClearheadError: naming the owner, where another process holds it; where it cannot be made.
    """
    with _hold(folder, folder / ".lock") as lock:
        remove_leftovers(folder)
        yield lock


@contextmanager
def hold_file(path: Path | None) -> Iterator[None]:
    """Hold a file that is appended to, its folder made as `hold_folder` does; None: hold nothing.

    Raises:
        ClearheadError: as `hold_folder`.
    """
    if path is None:
        yield
        return
    require_regular(path)
    with _hold(path, path.with_name(f".{path.name}.lock")):
        yield


@contextmanager
def _hold(held: Path, place: Path) -> Iterator[Lock]:
    # Absolute: a change of the working directory must not leave the lock behind.
    place = place.absolute()
    made = [folder for folder in (place.parent, *place.parent.parents) if not folder.exists()]
    try:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(held, place)
        except (FileExistsError, NotADirectoryError) as error:
            raise ClearheadError(
                f"cannot lock {held}: a file is where a folder has to be: choose another place"
            ) from error
        except OSError as error:
            raise ClearheadError(
                f"cannot lock {held} ({error.strerror}): make room, or choose another place"
            ) from error
        try:
            yield lock
        finally:
            lock.release()
    finally:
        with contextlib.suppress(OSError):  # folders that were written into stay
            for folder in made:
                folder.rmdir()
