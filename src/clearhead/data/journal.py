"""The journal from which an interrupted build resumes.

Each line is a mark: how far in the text the files of the build reach, their sizes, and the SHA-256
of what was added to each since the mark before. A build that goes on verifies them, and drops what
comes after the last mark up to which all is whole.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.records.identity import digest_of

JOURNAL = "journal.jsonl"


class Mark(NamedTuple):
    """A place between two documents.

    Attributes:
        source: number of the source.
        documents: how many documents of the source come before.
        digest: a hash of their texts.
        size: bytes of text that come before, in all sources.
    """

    source: int
    documents: int
    digest: str
    size: int


class MarkedFile:
    """A file that is appended to, with the hash of what was added since the last mark."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = open(path, "ab")  # noqa: SIM115
        self.size = self._file.tell()
        self._added = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._added.update(data)
        self.size += len(data)

    def mark(self) -> tuple[int, str]:
        """Hand all to the system; return the file's size and the hash of what was added."""
        self._file.flush()
        added, self._added = self._added.hexdigest(), hashlib.sha256()
        return self.size, added

    def close(self) -> None:
        self._file.close()


class Journal:
    """The journal in a folder; what follows its last good mark in the files is dropped.

    Args:
        names: of the files.
        key: of everything else that decides their content; marks of another are not good.

    Attributes:
        mark: the last one; None where there is none.
    """

    def __init__(self, folder: Path, names: Sequence[str], key: str) -> None:
        self._path, self._key = folder / JOURNAL, key
        self.mark: Mark | None = None
        ends, lines = dict.fromkeys(names, 0), list[str]()
        for line in self._lines():
            added = line["files"]
            if line["key"] != key or not all(
                _is_whole(folder / name, ends[name], *added[name]) for name in names
            ):
                break
            self.mark = Mark(*line["mark"])
            ends = {name: added[name][0] for name in names}
            lines.append(_sealed(line))
        self._path.write_text("".join(lines), encoding="ascii")
        for name, size in ends.items():
            with open(folder / name, "ab") as file:
                file.truncate(size)

    def add(self, mark: Mark, files: Sequence[MarkedFile]) -> None:
        """Record that the files hold all up to `mark`."""
        added = {file.name: file.mark() for file in files}
        with open(self._path, "a", encoding="ascii") as file:
            file.write(_sealed({"key": self._key, "mark": mark, "files": added}))

    def _lines(self) -> list[dict[str, Any]]:
        """The lines before the first damaged one."""
        lines = list[dict[str, Any]]()
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            for text in self._path.read_bytes().splitlines():
                line = json.loads(text)
                if line.pop("seal") != digest_of(line):
                    break
                lines.append(line)
        return lines


def is_begun(folder: Path) -> bool:
    """True if a build can go on in a folder."""
    with suppress(OSError):
        return (folder / JOURNAL).stat().st_size > 0
    return False


def forget(folder: Path) -> None:
    """Remove the journal: of a build that is finished, or is to be begun anew."""
    (folder / JOURNAL).unlink(missing_ok=True)


def _sealed(line: dict[str, Any]) -> str:
    return json.dumps({**line, "seal": digest_of(line)}) + "\n"


def _is_whole(path: Path, start: int, end: int, digest: str) -> bool:
    """True if the part of a file from `start` to `end` has this hash."""
    found = hashlib.sha256()
    with suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(end - start, 1 << 20))):
            found.update(data)
            start += len(data)
    return start == end and found.hexdigest() == digest
