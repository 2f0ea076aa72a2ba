"""The protocol of measurements: cells, each measured by itself, on one subject and its texts."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from clearhead.data import Corpus
from clearhead.data.tokenizer import Encoder
from clearhead.measure.answers import Reader, check_length, ends_of
from clearhead.records.runs import Line

Cell = Mapping[str, Any]


class Document(NamedTuple):
    """A text: its name in results, and its tokens, 1-D."""

    name: str
    ids: np.ndarray


class Texts:
    """A corpus that is prepared when the first task reads it; some need no text at all.

    Args:
        prepare: makes the corpus.
        splits: those that are read.
    """

    def __init__(self, prepare: Callable[[], Corpus], splits: Sequence[str]) -> None:
        self._prepare = prepare
        self.splits = tuple(splits)

    @property
    def read(self) -> Corpus | None:
        """The corpus, if any task has read it."""
        return self.__dict__.get("corpus")

    @cached_property
    def corpus(self) -> Corpus:
        return self._prepare()

    @cached_property
    def documents(self) -> list[Document]:
        """The documents of the splits, source by source, with their BEGIN and END."""
        documents = []
        for split in self.splits:
            for stream in self.corpus.split(split):
                for number, ids in enumerate(np.split(stream.tokens, stream.starts)[1:]):
                    opening = self.corpus.tokenizer.decode(
                        ids[:24].tolist(), skip_special_tokens=True
                    )
                    name = f"{stream.spec} {split} {number}: {' '.join(opening.split())[:40]}"
                    documents.append(Document(name, ids))
        return documents

    @cached_property
    def streams(self) -> list[Document]:
        """Each source's documents of a split end to end, as one text."""
        return [
            Document(f"{stream.spec} {split}", stream.tokens)
            for split in self.splits
            for stream in self.corpus.split(split)
            if len(stream)
        ]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is measured, and the text it is given.

    Attributes:
        model: of transformers. tokenizer: its own.
        texts: tokenised by it.
        lengths: in tokens, ascending.
        tokens: of text read at each length, about.
        batch_tokens: run together; no result depends on it.
        seed: of every random choice.
    """

    model: Any
    tokenizer: Any
    texts: Texts
    lengths: tuple[int, ...]
    tokens: int
    batch_tokens: int
    seed: int

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the model and its rope scaling."""
        return parameters_digest(self.model, self.model.config.to_json_string())

    @cached_property
    def reader(self) -> Reader:
        """Reads prompts; caches their common prefix."""
        ends = ends_of(self.model, self.tokenizer)
        return Reader(self.model, batch_tokens=self.batch_tokens, ends=ends)

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer, a fast one, without special tokens."""
        return Encoder(self.tokenizer)

    @property
    def begin(self) -> tuple[int, ...]:
        """The begin token, where the tokenizer has one."""
        begin = self.encoder.begin
        return () if begin is None else (begin,)

    def ids(self, *pieces: str) -> list[tuple[int, ...]]:
        """The tokens of one text by its pieces; the first piece's follow the begin token.

        A piece is never encoded by itself: many tokenizers put a space before a text.
        """
        first, *others = self.encoder.pieces(*pieces)
        return [(*self.begin, *first), *others]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def check_length(self, length: int) -> None:
        """Refuse texts of so many tokens, answer included, that the model has no positions for."""
        check_length(self.model, length)

    def release(self) -> None:
        """Drop the reader and its cache."""
        self.__dict__.pop("reader", None)


class Task(Protocol):
    """A measurement: a frozen dataclass of its options, which records keep.

    `cells` lists what is measured, as dimensions of records, and refuses at once what cannot be. A
    cell's "digest" is of the files that it reads. `measure` gives one cell's lines: measures
    {"metric", "value", …} and other payloads of records, with a "kind". `drawn` says whether a seed
    decides what is read: only then are several seeds measured. A task may have `headlines`, the
    numbers that tables show: a cell whose logits are not finite has each of them without a value.
    """

    drawn: ClassVar[bool]

    def cells(self, subject: Any) -> list[Cell]:
        """The dimensions of every cell, in the order in which they share most."""

    def measure(self, subject: Any, cell: Cell) -> Iterable[Line]:
        """The lines of one cell."""


def parameters_digest(model: Any, start: str = "") -> str:
    """A hash of `start` and of each parameter's name, sum and sum of squares, 16 hex digits."""
    digest = hashlib.sha256(start.encode())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = parameter.double()
            digest.update(f"{name} {wide.sum():.12e} {wide.square().sum():.12e}".encode())
    return digest.hexdigest()[:16]
