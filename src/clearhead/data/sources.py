"""Sources of text, `SPEC` or `SPEC@WEIGHT`, as documents in a fixed order."""

import difflib
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

from clearhead.data import hub, synthetic
from clearhead.data.config import DataConfig
from clearhead.data.readers import ENDINGS, TEXT, UndecodableError, ending, read, readable, text_of
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

    `text_field` and `limit` are as in `DataConfig`, and `spec` is the source as the user wrote it.
    Synthetic and hub sources have no files; `revision` is that of a hub data set.
    """

    spec: str
    weight: float | None
    files: tuple[Path, ...]
    text_field: str = "text"
    limit: int | None = None
    revision: str | None = None

    @property
    def in_pieces(self) -> bool:
        """True if this is one text file, cut so that a part of it can be held out."""
        return len(self.files) == 1 and ending(self.files[0]) in TEXT

    def documents(self, skipped: Counter[str], *, whole: bool = False) -> Iterator[Document]:
        """Yield the documents, always in the same order; count in `skipped` what is left out.

        The keys of `skipped` are "undecodable" (files, where there are several) and "empty" (texts
        of white space). A text file is one document where it is read as a `whole`.

        Raises:
            ClearheadError: a file that cannot be read, named with the place in it.
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
            except UndecodableError:
                if len(self.files) == 1:
                    raise
                skipped["undecodable"] += 1

    def _readings(self, whole: bool) -> Iterator[Iterator[str]]:
        if synthetic.is_synthetic(self.spec):
            yield synthetic.texts(self.spec)
        if hub.is_hub(self.spec):
            rows = hub.rows(self.spec, self.revision)
            yield (text_of(row, self.text_field, where) for where, row in rows)
        for path in self.files:
            yield read(path, self.text_field, in_pieces=self.in_pieces and not whole)


def parse(word: str) -> tuple[str, float | None]:
    """Parse "SPEC@WEIGHT" into the spec and its weight, None where there is no weight.

    An `@` within the name of an existing file or folder does not start a weight.

    Raises:
        ClearheadError: for a weight that is not a number above 0, or an empty spec.
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
    if not (math.isfinite(number) and number > 0):
        raise ClearheadError(
            f"data {word!r}: the weight after '@' is {weight!r}; give a number above 0, "
            f"for example {spec}@0.5"
        )
    return spec, number


def find(config: DataConfig, progress: Callable[[str], None]) -> tuple[Source, ...]:
    """Find the files of every source of a config, and the revisions of data sets of the hub.

    One source without a weight among weighted ones takes what these leave of 1.

    Raises:
        ClearheadError: for a source that does not exist, holds nothing to read or has a bad
            weight, and where some sources have a weight and it is not clear what others have.
    """
    parsed = [parse(word) for word in config.data]
    bare = [spec for spec, weight in parsed if weight is None]
    if bare and len(bare) < len(parsed):
        rest = 1 - sum(weight for _, weight in parsed if weight is not None)
        if len(bare) > 1 or rest <= 0:
            raise ClearheadError(
                f"data {bare[0]!r} has no weight while others have one: give every source a "
                "weight (SPEC@WEIGHT), or none, or let one take what the others leave of 1"
            )
        parsed = [(spec, rest if weight is None else weight) for spec, weight in parsed]
    cache = config.cache_folder
    return tuple(
        Source(
            *(spec, weight, _files(spec), config.text_field, config.limit),
            revision=hub.pinned_revision(spec, cache, progress) if hub.is_hub(spec) else None,
        )
        for spec, weight in parsed
    )


def passages(words: str, progress: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts of a source, each whole; or `words` themselves, if they name no source.

    A text file may have any suffix here. Words that look like a path are not taken as text: a
    single word with a file's suffix, or with an existing folder before its last slash.

    Raises:
        ClearheadError: as `find`; for a text that is not UTF-8, or a source without any.
    """
    path, word = Path(os.path.expanduser(words)), words if len(words.split()) == 1 else ""
    there = bool(words) and os.path.exists(path)
    named = word in (STDLIB, PACKAGES) or synthetic.is_synthetic(word) or hub.is_hub(word)
    if there and not (path.is_dir() or readable(path)):
        yield from read(path, "text")
    elif there or named:
        (source,) = find(DataConfig(data=(words,)), progress)
        document = None
        for document in source.documents(Counter(), whole=True):
            yield document.text
        if document is None:
            raise ClearheadError(f"{words} holds no text: give a file with one, or words in quotes")
    elif word and (readable(path) or (os.sep in word and path.parent.is_dir())):
        raise ClearheadError(
            f"{words}: no such file or folder: give an existing one, or a text in quotes"
        )
    else:
        yield in_utf8(words)


def _files(spec: str) -> tuple[Path, ...]:
    if spec in (STDLIB, PACKAGES):
        files = _walk(Path(sysconfig.get_path("stdlib")), suffix=".py", without=_THIRD_PARTY)
        return files if spec == STDLIB else files + _installed_packages()
    if synthetic.is_synthetic(spec):
        next(synthetic.texts(spec))  # refuses numbers that no document can meet
        return ()
    if hub.is_hub(spec):
        return ()
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        if files := _walk(path, wanted=readable):
            return files
        raise ClearheadError(f"data {spec!r}: nothing in this folder is {ENDINGS}")
    if not path.exists():
        near = difflib.get_close_matches(spec, (STDLIB, PACKAGES), n=1, cutoff=0.6)
        hint = f"give an existing path, {STDLIB}, {PACKAGES} or hf:NAME"
        if near:
            hint = f"did you mean {near[0]}?"
        raise ClearheadError(f"data {spec!r}: no such file or folder; {hint}")
    if not readable(path):
        raise ClearheadError(f"data {spec!r}: cannot read this kind of file; give {ENDINGS}")
    return (path,)


def _installed_packages() -> tuple[Path, ...]:
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    folders |= {Path(entry).resolve() for entry in sys.path if Path(entry).name in _THIRD_PARTY}
    return tuple(file for folder in sorted(folders) for file in _walk(folder, suffix=".py"))


def _walk(
    root: Path,
    *,
    suffix: str = "",
    wanted: Callable[[Path], bool] = Path.is_file,
    without: tuple[str, ...] = (),
) -> tuple[Path, ...]:
    """The wanted files under a folder, by name; hidden ones and linked folders are passed over."""
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        for name in names:
            if name[0] != "." and name.endswith(suffix):  # before a path is made of each name
                path = Path(folder, name)
                if wanted(path) and path.is_file():
                    files[path.relative_to(root).as_posix()] = path
    return tuple(files[name] for name in sorted(files))
