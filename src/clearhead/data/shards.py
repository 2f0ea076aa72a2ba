"""Memory-mapped token shards, published atomically and verified by checksum.

A build writes into a folder beside and gives it its final name by one rename, so a folder with that
name is complete. What an interrupted build leaves is gone on with, by its journal. `corpus.json`
holds the size and SHA-256 of every other file. They are verified once, and again when a file's
size, times or inode changed: damaged shards are built anew.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np

from clearhead.data.corpus import SPLITS, TokenStream
from clearhead.data.journal import JOURNAL, MarkedFile, is_begun
from clearhead.data.stat_cache import StatCache
from clearhead.errors import ClearheadError
from clearhead.records.files import sha256_of
from clearhead.records.identity import digest_of

_INDEX = "corpus.json"
_BUILDING, _DAMAGED = ".building-", ".damaged-"
_ABANDONED_SECONDS = 7 * 24 * 3600
_FILES = ("tokens", "starts")
_STARTS = np.dtype("<i8")


class DamagedError(Exception):
    """A published build whose files have changed; the message says how."""


class ShardWriter:
    """Writes the tokens of one source and split, with the offset of each document.

    It goes on after what the files hold.
    """

    def __init__(self, folder: Path, source: int, split: str, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._ids, self._starts = (MarkedFile(folder / _name(source, split, of)) for of in _FILES)

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return self._ids.size // self._dtype.itemsize

    @property
    def documents(self) -> int:
        """Documents begun."""
        return self._starts.size // _STARTS.itemsize

    @property
    def files(self) -> tuple[MarkedFile, MarkedFile]:
        """The stream that is written to."""
        return self._ids, self._starts

    def start(self) -> None:
        """The next token is the first of a document."""
        self._starts.write(np.asarray([self.tokens], dtype=_STARTS).tobytes())

    def write(self, ids: np.ndarray | list[int]) -> None:
        """Append ids."""
        self._ids.write(np.asarray(ids, dtype=self._dtype).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files:
            file.close()


@contextmanager
def going_on(target: Path, say: Callable[[str], None]) -> Iterator[Path | None]:
    """The folder of a build that will be `target`, for one process at a time.

    It holds what an interrupted build left. At exit it stays if its journal has a mark, unless it
    was published. None: another process has just been at it, and may have published it.

    Raises:
        ClearheadError: for whatever the operating system refuses inside, such as a full disk.
    """
    folder = target.with_name(_BUILDING + target.name)
    with _refusals(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, say)
            yield folder if _is_at(descriptor, folder) else None
        finally:
            if _is_at(descriptor, folder) and not is_begun(folder):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    """True if an open folder still has that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    return False


def _lock(descriptor: int, say: Callable[[str], None]) -> None:
    """Wait for the lock on a folder; the kernel frees it when its owner ends."""
    with suppress(OSError):  # file systems without locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process, which makes the same tokens")
            fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def _refusals(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClearheadError(
            f"cannot write to the cache {root}: {error.strerror or error}; what is whole is kept, "
            "make room and give the command again; or name another folder (cache, or "
            "$CLEARHEAD_CACHE)"
        ) from error


def seal(folder: Path, index: dict[str, Any]) -> None:
    """Write the index of a finished build, with the size and hash of every file in it."""
    files = {}
    beside = {folder / _INDEX, folder / JOURNAL}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in beside):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest]
    with open(folder / _INDEX, "w", encoding="utf-8") as file:
        index = index | {"files": files}
        json.dump(index | {"seal": digest_of(index)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check(folder: Path, verified: Path | None = None) -> dict[str, Any]:
    """Return the index of a build after verifying every file that it names.

    Args:
        verified: a `StatCache`, by which files that did not change since are not read again.
            Renaming the folder changes none.

    Raises:
        FileNotFoundError: there is no such folder.
        DamagedError: a file is missing, cut short or altered.
    """
    folder.stat()
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_bytes())
        seal = index.pop("seal")
        if seal != digest_of(index):
            raise DamagedError(f"the content of {_INDEX} has changed")
        cached = None
        if verified is not None:
            cached = StatCache(verified, [folder / name for name in index["files"]], seal)
            if cached.read():
                return index
        for name, (size, digest) in index["files"].items():
            path = folder / name
            if path.stat().st_size != size:
                raise DamagedError(f"{name} has {path.stat().st_size} bytes, not {size}")
            if sha256_of(path) != digest:
                raise DamagedError(f"the content of {name} has changed")
        if cached is not None:
            cached.write(True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(str(error)) from error
    return index


def publish(folder: Path, target: Path) -> None:
    """Give a sealed build its final name.

    Where another process was faster, its build, being of the same content, stays; a damaged one
    is moved away. Whoever has the files of either mapped keeps them: removed files stay readable.
    """
    while True:
        try:
            os.rename(folder, target)
            return
        except OSError:
            if not target.is_dir():
                raise
        try:
            check(target)
            return
        except FileNotFoundError:
            continue  # it was moved away in between
        except DamagedError:
            _remove(target)


def map_stream(
    folder: Path, number: int, split: str, dtype: np.dtype, *, spec: str, weight: float | None
) -> TokenStream:
    """Open the tokens and document offsets of a source and split, read-only."""
    path = folder / _name(number, split, "tokens")
    return TokenStream(
        spec=spec,
        weight=weight,
        tokens=_map(path, dtype),
        starts=_map(folder / _name(number, split, "starts"), _STARTS),
        file=FileIO(path),
    )


def digest_of_folder(folder: Path) -> str:
    """A hash of the names and contents of the files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of([[path.name, sha256_of(path)] for path in files])


def names(sources: int) -> list[str]:
    """The files of a build's tokens."""
    return [_name(*stream, of) for stream in streams(sources) for of in _FILES]


def streams(sources: int) -> Iterator[tuple[int, str]]:
    """Every (source, split) of a build."""
    return ((source, split) for source in range(sources) for split in SPLITS)


def _name(source: int, split: str, what: str) -> str:
    return f"{source}.{split}.{what}"


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:  # the operating system maps no empty file
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _remove(target: Path) -> None:
    """Move a folder out of its name at once, then delete it."""
    grave = Path(tempfile.mkdtemp(prefix=_DAMAGED, dir=target.parent))
    try:
        os.rename(target, grave / "corpus")
    except FileNotFoundError:
        pass  # another process did
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Delete folders of killed builds, in which nothing was written for a day."""
    for folder in [*root.glob(_BUILDING + "*"), *root.glob(_DAMAGED + "*")]:
        try:
            newest = max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
        except FileNotFoundError:
            continue  # its owner is just removing it
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
