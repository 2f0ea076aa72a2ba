"""One process at a time in a run folder or a file of records.

A lock is a folder with the owner's process number, its start time and its host, made elsewhere and
renamed into place: nobody sees it half written, and renaming to a name that is taken fails. A
killed owner leaves it behind; the next process on the same host removes it, once no process of that
number and start time is alive.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import remove_leftovers, require_regular

_OWNER = "owner.json"
_MACHINE = ("host", "machine")
_ATTEMPTS = 20


class Lock:
    """A lock that this process holds."""

    def __init__(self, held: Path, place: Path) -> None:
        self._held, self._place = held, place
        self._owner = _acquire(held, place)

    def check(self) -> None:
        """Raise a ClearheadError where the lock is gone: what it guards was deleted or moved."""
        if _read_owner(self._place) != self._owner:
            raise ClearheadError(
                f"{self._held} was deleted, moved or replaced while this process was writing to "
                "it: put it back and give the same command again, or choose another place"
            )

    def release(self) -> None:
        """Remove the lock, unless this is a forked child, or the lock is no longer there."""
        if self._owner["pid"] == os.getpid() and _read_owner(self._place) == self._owner:
            for leftover in self._place.parent.glob(f"{self._place.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # of a process killed while locking
            _remove(self._place)


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
        with contextlib.suppress(OSError):  # what was written into stays
            for folder in made:
                folder.rmdir()


def _acquire(held: Path, place: Path) -> dict[str, Any]:
    owner = {
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        **_host(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    other = None
    with _alone(place.parent):
        for _ in range(_ATTEMPTS):
            unfinished = _beside(place)
            try:
                unfinished.mkdir()
                (unfinished / _OWNER).write_text(json.dumps(owner), encoding="utf-8")
                unfinished.rename(place)
                return owner
            except OSError:
                shutil.rmtree(unfinished, ignore_errors=True)
                if not place.is_dir():
                    raise
            other = _read_owner(place)
            if other is None or not _is_dead(other):
                break
            _remove(place)
    raise ClearheadError(f"{held} is in use by {_named(other, place)}")


def _named(owner: dict[str, Any] | None, place: Path) -> str:
    if owner is None:
        return f"another process: wait for it; if there is none, delete {place}"
    if owner.get("pid") == os.getpid() and not _elsewhere(owner):
        return "this process already: choose another place"
    told = f"process {owner.get('pid')!s} on {owner.get('host')!s} since {owner.get('since')!s}"
    if _elsewhere(owner):
        return f"{told}: wait for it, or, if it no longer runs, delete {place}"
    return f"{told}: wait for it or stop it, or choose another place"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this host at a time judge and replace a lock in `folder`.

    The kernel frees this at a kill. Where a file system has no such locks, two processes that
    remove the same dead owner's lock in the same instant may both go on.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_owner(place: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads((place / _OWNER).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else None


def _remove(place: Path) -> None:
    # Under another name first: a lock is never seen without its owner.
    with contextlib.suppress(OSError):
        gone = place.rename(_beside(place))
        shutil.rmtree(gone, ignore_errors=True)


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}-{secrets.token_hex(4)}")


def _is_dead(owner: dict[str, Any]) -> bool:
    """True if the process is known to have ended; one that cannot be seen from here never is."""
    here = _host()
    same_machine = here["machine"] and all(owner.get(key) == here[key] for key in _MACHINE)
    if same_machine and owner.get("boot") != here["boot"]:
        return True  # the machine was started anew since
    if _elsewhere(owner):
        return False
    started = _start_time(owner["pid"])
    if started is not None:
        return started != owner.get("started")
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _elsewhere(owner: dict[str, Any]) -> bool:
    """True if the process runs where this one cannot see it."""
    return any(owner.get(key) != value for key, value in _host().items())


def _host() -> dict[str, str]:
    """This host, its start, and the process numbers that are seen here: a container has its own."""
    found = {"host": socket.gethostname(), "machine": "", "boot": "", "numbers": ""}
    with contextlib.suppress(OSError):
        found["machine"] = Path("/etc/machine-id").read_text().strip()
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["numbers"] = os.readlink("/proc/self/ns/pid")
    return found


def _start_time(pid: int) -> str | None:
    """When a process started, in the system's words; None where there is none to be seen."""
    if Path("/proc/self/stat").exists():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The second field, the command in brackets, may hold spaces and brackets itself.
        state, *fields = stat.rpartition(")")[2].split()
        return "ended" if state in "ZX" else fields[18]
    try:
        words = ["ps", "-o", "lstart=", "-p", str(pid)]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ran.stdout.strip() or None
