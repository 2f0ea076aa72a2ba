"""The documents that evaluations read: those of a corpus's split, one by one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from clearhead.data import Corpus
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text as tokens, 1-D; its source as the user named it; and its name in results."""

    spec: str
    name: str
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


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
        return list(self._documents())

    @cached_property
    def streams(self) -> list[Document]:
        """Each source's documents of a split end to end, as one text."""
        return [
            Document(spec=stream.spec, name=f"{stream.spec} {split}", ids=stream.tokens)
            for split in self.splits
            for stream in self.corpus.split(split)
            if len(stream)
        ]

    def _documents(self) -> Iterator[Document]:
        for split in self.splits:
            for stream in self.corpus.split(split):
                bounds = [*stream.starts.tolist(), len(stream)]
                for number, (start, stop) in enumerate(pairwise(bounds)):
                    ids = stream.tokens[start:stop]
                    opening = self.corpus.tokenizer.decode(
                        ids[:24].tolist(), skip_special_tokens=True
                    )
                    name = f"{stream.spec} {split} {number}: {' '.join(opening.split())[:40]}"
                    yield Document(spec=stream.spec, name=name, ids=ids)


def at_least(found: list[Document], length: int) -> list[Document]:
    """The documents of `length` tokens or more.

    Raises:
        ClearheadError: where there is none, naming the longest.
    """
    long = [document for document in found if len(document) >= length]
    if not long:
        longest = max(found, key=len, default=None)
        known = "there is none at all" if longest is None else f"the longest has {len(longest):,}"
        raise ClearheadError(
            f"no document of {length:,} tokens ({known} of {len(found):,}): give longer texts or "
            "shorter lengths, or read each source as one text (--perplexity.text stream)"
        )
    return long
