"""One process at a time in a run folder or a file of records, by a file that names its owner.

The kernel releases the lock when the owner dies (flock); forked children do not inherit it.
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
from clearhead.records.files import remove_leftovers, require_regular, writing

_PATIENCE = 0.2  # seconds, within which another process may be removing its lock


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, made if missing, and removed at the end if still empty, with temporary files
    of a killed owner. A ClearheadError names the owner of a lock."""
    with _hold(folder, folder / ".lock"):
        remove_leftovers(folder)
        yield


@contextmanager
def hold_file(path: Path) -> Iterator[None]:
    """Hold a file that is appended to and make its folder, as `hold_folder`."""
    require_regular(path)
    with _hold(path, path.with_name(f".{path.name}.lock")):
        yield


@contextmanager
def _hold(held: Path, place: Path) -> Iterator[None]:
    # Absolute: a change of the working directory must not leave the lock behind.
    place, owner = place.absolute(), os.getpid()
    missing = [folder for folder in (place.parent, *place.parent.parents) if not folder.exists()]
    lock = FileLock(place, fallback_to_soft=False)
    try:
        with writing(held, "choose another place"):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=_PATIENCE)
            except Timeout:
                named = ""
                with contextlib.suppress(OSError):
                    named = place.read_text(errors="replace")[:200]
                raise ClearheadError(
                    f"{held} is in use by {named or 'another process'}: wait for it or stop it, "
                    "or choose another place"
                ) from None
        try:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            place.write_text(f"process {owner} on {socket.gethostname()} since {since}")
            yield
        finally:
            if os.getpid() == owner:  # a forked child leaves it to its parent
                place.unlink(missing_ok=True)
                lock.release()
    finally:
        with contextlib.suppress(OSError):  # folders that were written into stay
            for folder in missing:
                folder.rmdir()
