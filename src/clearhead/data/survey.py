"""One look at every document: what the corpus is, and which side of the split a document is on.

The side is a function of the hash of the text alone. So equal documents, in one source or two, are
always on the same side; the split does not move when documents are added; order does not matter.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clearhead.data.sources import Document, Source
from clearhead.data.tokenizer import cut
from clearhead.errors import ClearheadError

SAMPLE_BYTES = 16 << 20  # of training text, for the tokenizer
_SAMPLE_PIECE = 16 << 10  # characters; small enough that no one document dominates the sample


@dataclass(frozen=True, kw_only=True)
class SourceSurvey:
    """What one source holds: documents, bytes, a hash of all its texts, and what was left out."""

    documents: int
    size: int
    digest: str
    skipped: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a corpus holds, and `threshold`: documents whose key is below it are held out."""

    sources: tuple[SourceSurvey, ...]
    threshold: int

    @property
    def size(self) -> int:
        """Bytes of text in all sources."""
        return sum(source.size for source in self.sources)

    def held_out(self, document: Document) -> bool:
        """Whether a document is on the validation side."""
        return key(document) < self.threshold


def key(document: Document) -> int:
    """64 bits of the hash of the text, uniform over documents."""
    return int.from_bytes(document.digest[:8], "big")


def survey(
    sources: tuple[Source, ...], validation: float, progress: Callable[[str], None]
) -> Survey:
    """Read every document once and place the split.

    A share `validation` of the key range is held out. Where that leaves a side empty, as it may
    with a few dozen documents, the split moves just far enough to give that side one document.

    Raises:
        ClearheadError: for a source without text, or a corpus with fewer than two different
            documents; and whatever reading raises.
    """
    found, lowest, highest = [], 1 << 64, -1
    for source in sources:
        skipped: Counter[str] = Counter()
        digest = hashlib.sha256()
        documents = size = 0
        for document in source.documents(skipped):
            documents += 1
            size += document.size
            digest.update(document.digest)
            lowest, highest = min(lowest, key(document)), max(highest, key(document))
        left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items()))
        if not documents:
            raise ClearheadError(
                f"data {source.spec!r} holds no text ({left_out or 'it is empty'}); "
                "give data with at least two documents"
            )
        progress(
            f"{source.spec}: {documents:,} documents, {size / 1e6:.1f} MB"
            + (f" (skipped: {left_out})" if left_out else "")
        )
        if unsure := source.without_checksums():
            progress(
                f"{source.spec}: damage in {unsure[0]} would not be noticed: written without "
                "page checksums" + (f", as {len(unsure) - 1} more" if unsure[1:] else "")
            )
        found.append(
            SourceSurvey(
                documents=documents,
                size=size,
                digest=digest.hexdigest(),
                skipped=dict(sorted(skipped.items())),
            )
        )
    if lowest == highest:
        names = ", ".join(source.spec for source in sources)
        raise ClearheadError(
            f"data {names}: too small to split, {sum(s.documents for s in found)} document(s) and "
            "all alike; give two different ones at least, or name one text file of several KB "
            "itself, which is cut into pieces"
        )
    threshold = min(max(int(validation * (1 << 64)), lowest + 1), highest)
    return Survey(sources=tuple(found), threshold=threshold)


def sample(sources: tuple[Source, ...], found: Survey) -> Iterator[str]:
    """Yield about `SAMPLE_BYTES` of training text, or all of it where there is less.

    Documents are cut into pieces, and a hash of each piece's place decides whether it is taken:
    so the sample is spread evenly over all sources and all of each, and is always the same.
    """
    share = SAMPLE_BYTES / found.size
    for source in sources:
        for document in source.documents(Counter()):
            if found.held_out(document):
                continue
            for number, piece in enumerate(cut(document.text, _SAMPLE_PIECE)):
                place = hashlib.sha256(document.digest + number.to_bytes(8, "big")).digest()
                if int.from_bytes(place[:8], "big") < share * (1 << 64):
                    yield piece
