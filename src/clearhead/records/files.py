"""Atomic files and folders, complete or absent whenever the process or machine dies; and locks by a
file that names its owner, released by the kernel when the owner dies (flock)."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clearhead.errors import ClearheadError

_PREFIX = ".writing-"
_PATIENCE = 0.2  # seconds, within which another process may be removing its lock
SAVE = "save what it gives, and name that"  # of a pipe that would be read


@contextmanager
def writing(target: Path, advice: str) -> Iterator[None]:
    """Turn an error of writing, such as a full disk, into a one-line error that names `target`."""
    try:
        yield
    except OSError as error:
        refusal = error.strerror or str(error)
        raise ClearheadError(f"cannot write {target} ({refusal}): {advice}") from error
    except ClearheadError:
        raise
    except Exception as error:  # safetensors and tokenizers, in Rust, have exceptions of their own
        if (refused := re.search(r"([^:]+) \(os error \d+\)", str(error))) is None:
            raise
        raise ClearheadError(f"cannot write {target} ({refused[1].strip()}): {advice}") from error


def require_regular(path: Path, advice: str = "name a file") -> None:
    """Refuse a pipe or a device: reading may never end, and writing would replace it by a file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ClearheadError(f"{path}: not a regular file: {advice}")


def require_new(target: Path) -> None:
    """Raise a ClearheadError where a folder exists: before work that `publish_folder` publishes."""
    if target.exists():
        raise ClearheadError(f"{target} exists: give a folder that does not exist yet")


@contextmanager
def publish_folder(
    target: Path, advice: str = "make room and give the same command again"
) -> Iterator[Path]:
    """Yield an empty folder, renamed to `target` once on the disk, or removed if the body fails."""
    with _published(target, target.with_name(_PREFIX + target.name), advice) as temporary:
        temporary.mkdir()
        yield temporary


def write_text(path: Path, text: str, advice: str = "make room or choose another place") -> None:
    """Replace `path` atomically by a file with `text`; a missing folder is created."""
    require_regular(path)
    # With the process's number: two that write one file never share the unfinished copy.
    with _published(path, path.with_name(f"{_PREFIX}{os.getpid()}-{path.name}"), advice) as copy:
        # A file name that is not UTF-8 holds lone surrogates; JSON and HTML read their escapes.
        copy.write_bytes(text.encode("utf-8", "backslashreplace"))


@contextmanager
def _published(target: Path, temporary: Path, advice: str) -> Iterator[Path]:
    with writing(target, advice):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        try:
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                _sync(path)
            temporary.replace(target)
        except BaseException:
            _remove(temporary)
            raise
        _sync(target.parent)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` by `value` as readable JSON; see `write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Read a JSON object; a ClearheadError names the file, with `advice`, where it is none."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
    except OSError as error:
        raise ClearheadError(f"cannot read {path} ({error.strerror}): {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{path} is damaged ({error}): {advice}") from error
    return value


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a killed process left directly under `folder`."""
    for path in folder.glob(_PREFIX + "*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, made if missing, removed if empty; a ClearheadError names a lock's owner."""
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
                named = "another process"
                with contextlib.suppress(OSError):
                    named = place.read_text(errors="replace")[:200] or named
                advice = "wait for it or stop it, or choose another place"
                raise ClearheadError(f"{held} is in use by {named}: {advice}") from None
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
