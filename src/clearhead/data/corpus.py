"""Tokens at rest: memory-mapped streams, one a source and split."""

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.errors import choose

SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The documents of one source and split, end to end.

    Attributes:
        spec: the source, as the user named it.
        weight: its weight, None where no source has one.
        tokens: ids, 1-D, uint16 or uint32, memory-mapped and read-only.
        starts: offset of each document's first token, 1-D int64, memory-mapped.
    """

    spec: str
    weight: float | None
    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


class Corpus:
    """Tokenised text with its tokenizer; `clearhead.data.prepare` makes it.

    Attributes:
        tokenizer: a `transformers.PreTrainedTokenizerFast`; it adds BEGIN and END to nothing.
        vocabulary_size: the number of ids a model needs, one more than the largest.
        fingerprint: hex hash of all that determines what a model reads: every text, the
            tokenizer, the split, and the weights of the sources.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        vocabulary_size: int,
        content: str,
        streams: dict[str, tuple[TokenStream, ...]],
        description: dict[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        weights = [stream.weight for stream in streams["train"]]
        # Weights choose what is read of the tokens, not the tokens: they are no part of `content`,
        # by which a build is reused, but a run resumed with other weights is another run.
        self.fingerprint = hashlib.sha256(json.dumps([content, weights]).encode()).hexdigest()
        self._streams = streams
        self._description = description

    def split(self, name: str) -> tuple[TokenStream, ...]:
        """The streams of "train" or "validation", one a source, in the order of the sources.

        A small source may have an empty stream on one side.

        Raises:
            ClearheadError: for another name.
        """
        return self._streams[choose("split", name, SPLITS)]

    def describe(self) -> dict[str, Any]:
        """Description of the corpus for JSON: sources, documents and tokens by split, hashes."""
        return copy.deepcopy(self._description) | {"fingerprint": self.fingerprint}
