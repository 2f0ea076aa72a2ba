"""The protocol of evaluations: cells, each measured by itself, on one subject."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError
from clearhead.eval.answers import Reader, ends_of
from clearhead.eval.documents import Texts
from clearhead.eval.fingerprints import weights_digest
from clearhead.eval.rope_limits import check_length

Cell = Mapping[str, Any]
Advanced = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model under evaluation, and the text it is given.

    Attributes:
        model: a causal language model of transformers. tokenizer: its own, a fast one.
        texts: tokenised by it.
        lengths: in tokens, ascending.
        tokens: of text read at each length, about.
        batch_tokens: run together; no result depends on it.
        seed: of every random choice.
        kept: a file for texts and verdicts, each written as it is made; None keeps nothing.
    """

    model: Any
    tokenizer: Any
    texts: Texts
    lengths: tuple[int, ...]
    tokens: int
    batch_tokens: int
    seed: int
    kept: Path | None = None

    @cached_property
    def reader(self) -> Reader:
        """Reads prompts; caches their common prefix."""
        ends = ends_of(self.model, self.tokenizer)
        return Reader(self.model, batch_tokens=self.batch_tokens, ends=ends)

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the model and its rope scaling."""
        return weights_digest(self.model)

    def check_length(self, length: int) -> None:
        """Refuse texts of so many tokens, answer included, that the model has no positions for."""
        check_length(self.model, length)

    def release(self) -> None:
        """Drop the reader and its cache."""
        self.__dict__.pop("reader", None)

    @property
    def begin(self) -> tuple[int, ...]:
        """The begin token, where the tokenizer has one."""
        begin = self._encoder.begin
        return () if begin is None else (begin,)

    def encode(self, text: str) -> tuple[int, ...]:
        """A text's tokens, none of them special."""
        return tuple(self._encoder.encode([text])[0].tolist())

    def continuation(self, prompt: str, text: str) -> tuple[int, ...]:
        """The tokens of `text` as they are after `prompt`, where that is cut between tokens."""
        before, whole = self.encode(prompt), self.encode(prompt + text)
        return whole[len(before) :] if whole[: len(before)] == before else self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer)


class Task(Protocol):
    """An evaluation: a frozen dataclass of its options, which records keep.

    `cells` lists what is measured, and refuses at once what cannot be. `measure` returns one cell's
    numbers, ready for JSON, and calls `advanced` with the number of windows or prompts done.
    `headlines` are the numbers that tables show; a task without any names them in a cell's numbers.
    """

    headlines: ClassVar[tuple[str, ...]]

    def cells(self, subject: Subject) -> list[Cell]:
        """The dimensions of every cell, in the order in which they share most."""

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> dict[str, Any]:
        """The numbers of one cell."""


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for a share of independent trials."""
    z = 1.959963984540054
    share, squared = successes / trials, z * z / trials
    centre = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / trials / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def parted(words: Sequence[str]) -> list[str]:
    """Split words at commas; each word once."""
    return list(dict.fromkeys(filter(None, (one for word in words for one in word.split(",")))))


def check_depths(depths: Sequence[float]) -> None:
    """Refuse depths outside 0 to 1."""
    if not depths or any(not 0 <= depth <= 1 for depth in depths):
        raise ClearheadError(
            f"depths are {' '.join(map(str, depths)) or 'none'}: each is a share of the text "
            "before what is hidden, from 0 to 1"
        )


def check_count(**counts: int) -> None:
    """Refuse counts below 1, by name."""
    for name, count in counts.items():
        if count < 1:
            raise ClearheadError(f"{name} is {count}: at least 1")
