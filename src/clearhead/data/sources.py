"""Sources of text, `SPEC` or `SPEC@WEIGHT`, as documents in a fixed order."""

import hashlib
import math
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clearhead.data import readers, synthetic
from clearhead.data.config import DataConfig
from clearhead.data.readers import ENDINGS, HUB, readable
from clearhead.errors import ClearheadError
from clearhead.metavars import in_utf8

STDLIB, PACKAGES = "python-stdlib", "python-packages"
_THIRD_PARTY = ("site-packages", "dist-packages")


class Document(NamedTuple):
    """A text, its length in UTF-8 bytes, and their SHA-256."""

    text: str
    size: int
    digest: bytes

    @property
    def key(self) -> int:
        """64 bits of the hash of the text, uniform over documents."""
        return int.from_bytes(self.digest[:8], "big")


@dataclass(frozen=True)
class Source:
    """One source of text: its files in order, and its weight if it has one.

    Synthetic and hub sources have no files; `revision` is that of a hub data set.
    """

    spec: str
    weight: float | None
    files: tuple[Path, ...]
    text_field: str = "text"
    limit: int | None = None
    revision: str | None = None

    def documents(self, skipped: Counter[str], *, whole: bool = False) -> Iterator[Document]:
        """Yield the documents, always in the same order; count in `skipped` what is left out.

        The keys of `skipped` are "undecodable" (files, where there are several) and "empty" (texts
        of white space). A text file that is the only one is cut, so that a part of it can be held
        out, unless it is read as a `whole`.
        """
        taken = 0
        for texts in self._readings(whole):
            try:
                for text in texts:
                    if not text or text.isspace():
                        skipped["empty"] += 1
                        continue
                    data = text.encode("utf-8")
                    yield Document(text, len(data), hashlib.sha256(data).digest())
                    taken += len(data)
                    if self.limit is not None and taken >= self.limit:
                        return
            except readers.UndecodableError:
                if len(self.files) == 1:
                    raise
                skipped["undecodable"] += 1

    def _readings(self, whole: bool) -> Iterator[Iterator[str]]:
        if self.spec.startswith(synthetic.PREFIX):
            yield synthetic.texts(self.spec)
        elif self.spec.startswith(HUB):
            rows = readers.hub_rows(self.spec, self.revision)
            yield (readers.text_of(row, self.text_field, where) for where, row in rows)
        for path in self.files:
            yield readers.read(path, self.text_field, in_pieces=len(self.files) == 1 and not whole)


def parse(word: str) -> tuple[str, float | None]:
    """Parse "SPEC@WEIGHT" into the spec and its weight, None where there is no weight.

    An `@` within the name of an existing file or folder does not start a weight.
    """
    spec, at, weight = word.rpartition("@")
    if not (spec if at else word).strip():
        raise ClearheadError(f"data {word!r} names no source; give a path, {STDLIB} or hf:NAME")
    if not at or os.path.exists(os.path.expanduser(word)):
        return word, None
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ClearheadError(
            f"data {word!r}: the weight after '@' is {weight!r}; give a number above 0, "
            f"for example {spec}@0.5"
        )
    return spec, number


def find(config: DataConfig, progress: Callable[[str], None]) -> tuple[Source, ...]:
    """Find the files of every source of a config, and the revisions of data sets of the hub.

    One source without a weight among weighted ones takes what these leave of 1.
    """
    parsed = [parse(word) for word in config.data]
    weights = [weight for _, weight in parsed if weight is not None]
    rest = 1 - sum(weights) if weights else None
    bare = [spec for spec, weight in parsed if weight is None]
    if bare and rest is not None and (len(bare) > 1 or rest <= 0):
        raise ClearheadError(
            f"data {bare[0]!r} has no weight while others have one: give every source a "
            "weight (SPEC@WEIGHT), or none, or let one take what the others leave of 1"
        )
    sources = []
    for spec, weight in parsed:
        files, revision = _files(spec), None
        if spec.startswith(HUB):
            revision = readers.pinned_revision(spec, config.cache_folder, progress)
        share = rest if weight is None else weight
        sources.append(Source(spec, share, files, config.text_field, config.limit, revision))
    return tuple(sources)


def passages(words: str, progress: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts of a source, each whole; or `words` themselves, if they name no source.

    A text file may have any suffix here. Words that look like a path are not taken as text: a
    single word with a file's suffix, or with an existing folder before its last slash.
    """
    path, word = Path(os.path.expanduser(words)), words if len(words.split()) == 1 else ""
    there = bool(words) and os.path.exists(path)
    if there and not (path.is_dir() or readable(path.name)):
        yield from readers.read(path, "text")
    elif there or word in (STDLIB, PACKAGES) or word.startswith((synthetic.PREFIX, HUB)):
        (source,) = find(DataConfig(data=(words,)), progress)
        document = None
        for document in source.documents(Counter(), whole=True):
            yield document.text
        if document is None:
            raise ClearheadError(f"{words} holds no text: give a file with one, or words in quotes")
    elif word and (readable(path.name) or (os.sep in word and path.parent.is_dir())):
        raise ClearheadError(
            f"{words}: no such file or folder: give an existing one, or a text in quotes"
        )
    else:
        yield in_utf8(words)


def _files(spec: str) -> tuple[Path, ...]:
    if spec in (STDLIB, PACKAGES):
        files = _walk(Path(sysconfig.get_path("stdlib")), _is_python, without=_THIRD_PARTY)
        if spec == PACKAGES:
            paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
            paths += [entry for entry in sys.path if Path(entry).name in _THIRD_PARTY]
            for folder in sorted({Path(path).resolve() for path in paths}):
                files += _walk(folder, _is_python)
        return files
    if spec.startswith(synthetic.PREFIX):
        next(synthetic.texts(spec))  # refuses numbers that no document can meet
        return ()
    if spec.startswith(HUB):
        return ()
    path = Path(os.path.expanduser(spec))
    if not path.exists():
        raise ClearheadError(
            f"data {spec!r}: no such file or folder; give an existing path, {STDLIB}, {PACKAGES} "
            "or hf:NAME"
        )
    files = _walk(path, readable) if path.is_dir() else (path,) * readable(path.name)
    if not files:
        place = "nothing in this folder is" if path.is_dir() else "cannot read it, for it is not"
        raise ClearheadError(f"data {spec!r}: {place} {ENDINGS}")
    return files


def _is_python(name: str) -> bool:
    return name.endswith(".py")


def _walk(
    root: Path, wanted: Callable[[str], bool], *, without: tuple[str, ...] = ()
) -> tuple[Path, ...]:
    """The files under a folder with wanted names; hidden ones and linked folders are left out."""
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        for name in names:
            if name[0] != "." and wanted(name) and (path := Path(folder, name)).is_file():
                files[path.relative_to(root).as_posix()] = path
    return tuple(files[name] for name in sorted(files))
