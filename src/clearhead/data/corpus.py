"""Memory-mapped token streams, one for each source and split."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError, choose
from clearhead.records.identity import digest_of

SPLITS = ("train", "validation")
STARTS = "<i8"  # offsets of documents
_TUNING, _TUNING_SHARE = "tuning", 0.1


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The documents of one source and split, end to end.

    Attributes:
        spec: the source, as the user named it.
        weight: its weight, None where no source has one.
        tokens: ids, 1-D, uint16 or uint32, memory-mapped and read-only.
        starts: offset of each document's first token, 1-D int64, memory-mapped.
        file: the open file of `tokens`; None for tokens in memory.
    """

    spec: str
    weight: float | None
    tokens: np.ndarray
    starts: np.ndarray
    file: FileIO | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start` on, int64.

        They are read from the file: pages of a mapping that were looked at count as this process's
        memory, and reading them in no order reads 32 times as much around them.

        Raises:
            ClearheadError: the file is shorter than when it was opened, or cannot be read.
        """
        if self.file is None:
            return self.tokens[start : start + length].astype(np.int64)
        size = self.tokens.itemsize
        data = b""
        with suppress(OSError):
            data = os.pread(self.file.fileno(), length * size, start * size)
        if len(data) < length * size:
            raise ClearheadError(
                f"the tokens of data {self.spec!r} cannot be read, or their file was cut short "
                "while it was in use: start again, and they are made anew"
            )
        return np.frombuffer(data, self.tokens.dtype).astype(np.int64)

    def openings(self, start: int, length: int) -> np.ndarray:
        """True where in a window a document begins, bool [length]."""
        low, high = np.searchsorted(self.starts, [start, start + length])
        opens_T = np.zeros(length, dtype=bool)
        opens_T[self.starts[low:high] - start] = True
        return opens_T


def map_stream(place: Path, dtype: str, spec: str, weight: float | None) -> TokenStream:
    """Open PLACE.tokens and PLACE.starts, the ids and document offsets of a source, read-only."""
    path = place.with_name(f"{place.name}.tokens")
    tokens, starts = (
        # The operating system maps no empty file.
        np.memmap(one, kind, mode="r") if one.stat().st_size else np.empty(0, kind)
        for one, kind in ((path, dtype), (path.with_suffix(".starts"), STARTS))
    )
    return TokenStream(spec=spec, weight=weight, tokens=tokens, starts=starts, file=FileIO(path))


def is_order_of(began: str, corpus: str) -> bool:
    """True if `began`, the batch fingerprint in a run's record, is of the corpus with fingerprint
    `corpus` or of its `for_tuning`."""
    texts = (corpus, digest_of([corpus, _TUNING]))
    orders = (*texts, *(digest_of([text, "feistel"]) for text in texts))
    return began.partition(",")[0] in orders


@dataclass(frozen=True, kw_only=True, eq=False)  # one is equal to itself alone
class Corpus:
    """Tokenised text with its tokenizer; `clearhead.data.prepare` makes it.

    Attributes:
        tokenizer: a `transformers.PreTrainedTokenizerFast`; it adds no BEGIN or END by itself.
        vocabulary_size: the number of ids a model needs, one more than the largest.
        fingerprint: hex hash of every text, the tokenizer, the split and the sources' weights.
        streams: of "train" and "validation", one a source, in the order of the sources; a small
            source may have an empty one on one side.
        description: sources, documents and tokens by split, for JSON.
    """

    tokenizer: Any
    vocabulary_size: int
    fingerprint: str
    streams: dict[str, tuple[TokenStream, ...]]
    description: dict[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> tuple[TokenStream, ...]:
        """The streams of "train" or "validation"; a ClearheadError for another name."""
        return self.streams[choose("split", name, SPLITS)]

    def for_tuning(self) -> "Corpus":
        """The training text alone, with the last tenth of each source held out in place of the
        validation split: settings chosen by it are chosen on text that no result reports.

        The cut is at a document, but within one where none begins in that tenth.
        """
        parts = []
        for stream in self.streams["train"]:
            cut = round((1 - _TUNING_SHARE) * len(stream))
            place = int(np.searchsorted(stream.starts, cut))
            if place < len(stream.starts):
                cut = int(stream.starts[place])
            tokens, starts = stream.tokens, stream.starts
            first = replace(stream, tokens=tokens[:cut], starts=starts[:place])
            rest = replace(stream, tokens=tokens[cut:], starts=starts[place:] - cut, file=None)
            parts.append((first, rest))
        train, held_out = zip(*parts, strict=True)
        return replace(
            self,
            streams={"train": train, "validation": held_out},
            fingerprint=digest_of([self.fingerprint, _TUNING]),
        )

    def describe(self) -> dict[str, Any]:
        """Description of the corpus for JSON: sources, documents and tokens by split, hashes."""
        return self.description | {"fingerprint": self.fingerprint}
