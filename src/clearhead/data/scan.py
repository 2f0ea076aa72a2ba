"""A scan of every document: the size and hash of a corpus, and its split.

The side of the split is a function of the hash of the text alone. So equal documents, in one source
or two, are always on the same side, the split does not move when documents are added, and order
does not matter.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clearhead.data.sources import Document, Source
from clearhead.data.stat_cache import keep, recall, state_of
from clearhead.data.tokenizer import cut
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of

# Raise it when the same files would give other texts than before.
_READING = 1
SAMPLE_BYTES = 16 << 20  # of training text, for the tokenizer
_SAMPLE_PIECE = 16 << 10  # characters; small enough that no one document dominates the sample


class SourceScan(NamedTuple):
    """The content of one source.

    Attributes:
        size: bytes of text.
        digest: a hash of all texts.
        skipped: the number of what was left out, by reason.
        lowest, highest: of the documents' keys.
    """

    documents: int
    size: int
    digest: str
    skipped: dict[str, int]
    lowest: int
    highest: int


@dataclass(frozen=True, kw_only=True)
class CorpusScan:
    """The content of a corpus; documents whose key is below `threshold` are held out."""

    sources: tuple[SourceScan, ...]
    threshold: int

    @property
    def size(self) -> int:
        """Bytes of text in all sources."""
        return sum(source.size for source in self.sources)

    def held_out(self, document: Document) -> bool:
        """True for a document on the validation side."""
        return document.key < self.threshold


def scan(
    sources: tuple[Source, ...], validation: float, cache: Path, progress: Callable[[str], None]
) -> CorpusScan:
    """Read every document once and place the split.

    Files that did not change since they were read are not read again.

    A share `validation` of the key range is held out. Where that leaves a side empty, as it may
    with a few dozen documents, the split moves just far enough to give that side one document.

    Args:
        cache: the folder in which surveys are kept.

    Raises:
        ClearheadError: for a source without text, or a corpus with fewer than two different
            documents; and whatever reading raises.
    """
    scans = [_surveyed(source, cache, progress) for source in sources]
    lowest, highest = min(one.lowest for one in scans), max(one.highest for one in scans)
    if lowest == highest:
        names = ", ".join(source.spec for source in sources)
        raise ClearheadError(
            f"data {names}: too small to split ({sum(s.documents for s in scans)} document(s), all "
            "alike); give at least two different ones, or name a text file of several KB itself, "
            "which is cut into pieces"
        )
    threshold = min(max(int(validation * (1 << 64)), lowest + 1), highest)
    return CorpusScan(sources=tuple(scans), threshold=threshold)


def survey(source: Source, cache: Path) -> Path:
    """The file that keeps the scan of a source."""
    name = digest_of([source.spec, source.text_field, source.limit])
    return cache / "surveys" / f"{name[:32]}.json"


def _surveyed(source: Source, cache: Path, progress: Callable[[str], None]) -> SourceScan:
    place, state = survey(source, cache), _state(source)
    known = recall(place, state)
    scanned = SourceScan(*known) if known is not None else _read(source)
    left_out = ", ".join(f"{number} {reason}" for reason, number in scanned.skipped.items())
    if not scanned.documents:
        raise ClearheadError(
            f"data {source.spec!r} holds no text ({left_out or 'it is empty'}); give data with at "
            "least two documents"
        )
    progress(
        f"{source.spec}: {scanned.documents:,} documents, {scanned.size / 1e6:.1f} MB"
        + f" (skipped: {left_out})" * bool(left_out)
        + ", unchanged since it was read" * (known is not None)
    )
    if known is None and state == _state(source):
        keep(place, state, scanned)
    return scanned


def _read(source: Source) -> SourceScan:
    skipped: Counter[str] = Counter()
    digest = hashlib.sha256()
    documents = size = 0
    lowest, highest = 1 << 64, -1
    for document in source.documents(skipped):
        documents += 1
        size += document.size
        digest.update(document.digest)
        lowest, highest = min(lowest, document.key), max(highest, document.key)
    left_out = dict(sorted(skipped.items()))
    return SourceScan(documents, size, digest.hexdigest(), left_out, lowest, highest)


def _state(source: Source) -> str | None:
    """The state of all that the text of a source depends on; None where that is more than files."""
    if source.revision is None and not source.files:
        return None
    files = [path.absolute() for path in source.files]
    return state_of(
        files,
        [
            *(_READING, source.spec, source.text_field, source.limit, source.revision),
            list(map(str, files)),
        ],
    )


def sample(sources: tuple[Source, ...], scanned: CorpusScan) -> Iterator[str]:
    """Yield about `SAMPLE_BYTES` of training text, or all of it where there is less.

    Documents are cut into pieces, and a hash of each piece's place decides whether it is taken:
    so the sample is spread evenly over all sources and all of each, and is always the same.
    """
    share = SAMPLE_BYTES / scanned.size
    for source in sources:
        for document in source.documents(Counter()):
            if scanned.held_out(document):
                continue
            for number, piece in enumerate(cut(document.text, _SAMPLE_PIECE)):
                place = hashlib.sha256(document.digest + number.to_bytes(8, "big")).digest()
                if int.from_bytes(place[:8], "big") < share * (1 << 64):
                    yield piece
