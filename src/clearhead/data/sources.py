"""Sources of text, `SPEC` or `SPEC@WEIGHT`, as documents in a fixed order; their size, hash and
split (`clearhead.data`)."""

import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.data import readers, synthetic
from clearhead.data.readers import ENDINGS, HUB, readable
from clearhead.data.tokenizer import cut
from clearhead.errors import ClearheadError
from clearhead.metavars import in_utf8
from clearhead.records.files import write_text
from clearhead.records.identity import digest_of
from clearhead.settings.data import DataConfig

STDLIB, PACKAGES = "python-stdlib", "python-packages"
_THIRD_PARTY = ("site-packages", "dist-packages")
_READING = 1  # to be raised when the same files would give other texts
SAMPLE_BYTES = 16 << 20  # of training text, for the tokenizer
_SAMPLE_PIECE = 16 << 10  # characters; small enough that no one document dominates the sample
# A file that changed so recently may change again within one tick of the file system's clock, and
# keep its time. Two seconds is the coarsest clock in use.
_RECENT_NS = 2_000_000_000


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
    """One source of text: its files in order, and its weight if it has one. Synthetic texts and
    data sets of the hub have no files; the latter have a `revision`."""

    spec: str
    weight: float | None
    files: tuple[Path, ...]
    text_field: str = "text"
    limit: int | None = None
    revision: str | None = None

    def documents(self, skipped: Counter[str], *, whole: bool = False) -> Iterator[Document]:
        """Yield the documents in a fixed order; count in `skipped` what is left out ("undecodable"
        files, where there are several, and "empty" texts). A text file that is the only one is
        cut, so that a part of it can be held out, unless it is read as a `whole`."""
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
            keep = self.limit is None and not whole  # as one wants of a corpus, read three times
            rows = readers.hub_rows(self.spec, self.revision, keep=keep)
            yield (readers.text_of(row, self.text_field, where) for where, row in rows)
        for path in self.files:
            yield readers.read(path, self.text_field, in_pieces=len(self.files) == 1 and not whole)


def parse(word: str) -> tuple[str, float | None]:
    """The spec and the weight (or None) of "SPEC@WEIGHT"; an `@` within the name of an existing
    file or folder does not start a weight."""
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
    """The sources of a config. One without a weight beside weighted ones gets the rest, up to 1.
    Revisions of data sets are queried from the hub."""
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
    """Yield the texts of a source, each whole, or `words` themselves, if they name no source and do
    not look like a path. A text file may have any suffix here."""
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
        next(synthetic.texts(spec), None)  # refuses numbers that no document can meet
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


class SourceScan(NamedTuple):
    """A source and its content, summarised in `cache_file`: bytes of text (`size`), a hash of all
    texts, the number left out by reason, and the smallest and largest `Document.key`."""

    source: Source
    cache_file: Path | None
    documents: int
    size: int
    digest: str
    skipped: dict[str, int]
    lowest: int
    highest: int


def scan(source: Source, cache: Path, progress: Callable[[str], None]) -> SourceScan:
    """Read every document of a source, unless no file changed since the scan kept in `cache`."""

    def read() -> list[Any]:
        skipped: Counter[str] = Counter()
        digest = hashlib.sha256()
        documents, size, lowest, highest = 0, 0, 1 << 64, -1
        for document in source.documents(skipped):
            documents, size = documents + 1, size + document.size
            digest.update(document.digest)
            lowest, highest = min(lowest, document.key), max(highest, document.key)
        left_out = dict(sorted(skipped.items()))
        return [documents, size, digest.hexdigest(), left_out, lowest, highest]

    files = [path.absolute() for path in source.files]
    key = [_READING, source.spec, source.text_field, source.limit, source.revision]
    cache_file = None  # generated text, and a folder in place of a data set, are read anew
    if files or source.revision is not None:
        name = digest_of([source.spec, source.text_field, source.limit])
        cache_file = cache / "surveys" / f"{name[:32]}.json"
    values, known = remembered(cache_file, files, [*key, list(map(str, files))], read)
    scanned = SourceScan(source, cache_file, *values)
    left_out = ", ".join(f"{number} {reason}" for reason, number in scanned.skipped.items())
    if not scanned.documents:
        raise ClearheadError(
            f"data {source.spec!r} holds no text ({left_out or 'it is empty'}); give data with at "
            "least two documents"
        )
    progress(
        f"{source.spec}: {scanned.documents:,} documents, {scanned.size / 1e6:.1f} MB"
        + f" (skipped: {left_out})" * bool(left_out)
        + ", unchanged since it was read" * known
    )
    return scanned


def threshold(scans: Sequence[SourceScan], validation: float) -> int:
    """The key below which documents are held out: a share `validation` of the range of keys, moved
    just far enough to leave one document on each side."""
    lowest, highest = min(one.lowest for one in scans), max(one.highest for one in scans)
    if lowest == highest:
        names = ", ".join(one.source.spec for one in scans)
        raise ClearheadError(
            f"data {names}: too small to split ({sum(s.documents for s in scans)} document(s), all "
            "alike); give two different ones, or a text file of several KB itself, which is cut"
        )
    return min(max(int(validation * (1 << 64)), lowest + 1), highest)


def sample(scans: Sequence[SourceScan], cutoff: int) -> Iterator[str]:
    """Yield about `SAMPLE_BYTES` of training text (keys from `cutoff` on), or all where it is less:
    pieces of documents by a hash of their place, so evenly from all sources and always the same."""
    share = SAMPLE_BYTES / sum(one.size for one in scans)
    for one in scans:
        for document in one.source.documents(Counter()):
            if document.key < cutoff:
                continue
            for number, piece in enumerate(cut(document.text, _SAMPLE_PIECE)):
                place = hashlib.sha256(document.digest + number.to_bytes(8, "big")).digest()
                if int.from_bytes(place[:8], "big") < share * (1 << 64):
                    yield piece


def remembered(
    path: Path | None, files: Sequence[Path], key: Any, compute: Callable[[], Any]
) -> tuple[Any, bool]:
    """The JSON value that `compute` returns, and True if `path` had it: it is reused while `key`
    (JSON) and every file's size, times and inode are unchanged. Nothing is stored if a file is
    missing, or so new that it may change unnoticed, or the folder cannot be written."""
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return compute(), False
    newest = max((one.st_mtime_ns for one in stats), default=0)
    if path is None or time.time_ns() - newest < _RECENT_NS:
        return compute(), False
    state = digest_of(
        [key, [[one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino] for one in stats]]
    )
    with suppress(OSError, ValueError, RecursionError, TypeError):
        known, value, digest = json.loads(path.read_bytes())
        if [state, digest_of([state, value])] == [known, digest]:
            return value, True
    value = compute()
    with suppress(ClearheadError):
        write_text(path, json.dumps([state, value, digest_of([state, value])]))
    return value, False
