"""A scan of every document: the size and hash of a corpus, and its split (`clearhead.data`)."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.data.sources import Source
from clearhead.data.tokenizer import cut
from clearhead.errors import ClearheadError
from clearhead.records.files import write_text
from clearhead.records.identity import digest_of

# Raise it when the same files would give other texts than before.
_READING = 1
SAMPLE_BYTES = 16 << 20  # of training text, for the tokenizer
_SAMPLE_PIECE = 16 << 10  # characters; small enough that no one document dominates the sample
# A file that changed so recently may change again within one tick of the file system's clock, and
# keep its time. Two seconds is the coarsest clock in use.
_RECENT_NS = 2_000_000_000


class SourceScan(NamedTuple):
    """A source and its content: bytes of text (`size`), a hash of all texts, the number of files
    or texts left out by reason, and the smallest and largest `Document.key`."""

    source: Source
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
    # Generated text, and a folder in place of a data set, are read anew.
    kept = survey(source, cache) if files or source.revision is not None else None
    values, known = remembered(kept, files, [*key, list(map(str, files))], read)
    scanned = SourceScan(source, *values)
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


def survey(source: Source, cache: Path) -> Path:
    """The file that keeps the scan of a source."""
    name = digest_of([source.spec, source.text_field, source.limit])
    return cache / "surveys" / f"{name[:32]}.json"


def threshold(scans: Sequence[SourceScan], validation: float) -> int:
    """The key below which documents are held out: a share `validation` of the range of keys, moved
    just far enough to leave one document on each side."""
    lowest, highest = min(one.lowest for one in scans), max(one.highest for one in scans)
    if lowest == highest:
        names = ", ".join(one.source.spec for one in scans)
        raise ClearheadError(
            f"data {names}: too small to split ({sum(s.documents for s in scans)} document(s), all "
            "alike); give at least two different ones, or name a text file of several KB itself, "
            "which is cut into pieces"
        )
    return min(max(int(validation * (1 << 64)), lowest + 1), highest)


def sample(scans: Sequence[SourceScan], cutoff: int) -> Iterator[str]:
    """Yield about `SAMPLE_BYTES` of training text (keys from `cutoff` on), or all where it is less.

    Documents are cut into pieces, and a hash of each piece's place decides whether it is taken:
    so the sample is spread evenly over all sources and all of each, and is always the same.
    """
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
    """The JSON value that `compute` returns, and whether it was reused from `path`.

    It is reused while `key` (JSON) and every file's size, times and inode are unchanged. Nothing is
    stored if a file is missing, or so new that it may change unnoticed; nor without a `path`, or in
    a folder that cannot be written.
    """
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
