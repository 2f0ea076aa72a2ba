"""Training text, and its conversion to tokens."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from clearhead.errors import ClearheadError
from clearhead.metavars import Field, Model, Source
from clearhead.ranges import Part, Range, check

SHARE = 0.25  # of the tokens that masked training hides (arXiv 2212.14034; BERT hid 0.15)
SMALLEST_VOCABULARY = 256 + 3  # every byte, and three special tokens
_ENTRIES = f"at least {SMALLEST_VOCABULARY} entries (256 bytes and 3 special tokens), such as 4096"
Vocabulary = Annotated[int, Range(_ENTRIES, lambda n: n >= SMALLEST_VOCABULARY)]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus of a run.

    Attributes:
        data: sources, each "SPEC" or "SPEC@WEIGHT", where SPEC is `python-stdlib`,
            `python-packages`, a file, a folder, `hf:name[:config][#split]` or
            `synthetic:task[:key=value,…]` (passkey, needle, recall, backcopy). Without weights
            every token of every source counts alike. With weights, which are shares of the tokens,
            at most one source may be without: it gets the rest of 1.
        tokenizer: folder or hub name of an existing tokenizer; None trains a byte-level BPE.
        vocabulary: entries of the trained tokenizer, the 256 bytes and 3 special ones included.
        text_field: the field of a .jsonl, .parquet or hub row that holds its text.
        validation: share of the documents held out, chosen by a hash of their text.
        limit: bytes of text (as UTF-8) after which a source stops; None takes it whole.
        cache: folder of the tokens; None is $CLEARHEAD_CACHE, or else ~/.cache/clearhead.

    Raises:
        ClearheadError: at construction, where a value cannot work.
    """

    data: tuple[Source, ...] = ("python-stdlib",)
    tokenizer: Model | None = None
    vocabulary: Vocabulary = 4096
    text_field: Field = "text"
    validation: Part = 0.02
    limit: Annotated[
        int | None, Range("a number of bytes above 0, or none to take everything", lambda n: n > 0)
    ] = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, str) or not self.data:
            raise ClearheadError(
                f"data is {self.data!r}: give a tuple of one source or more, "
                "for example ('python-stdlib',)"
            )
        check(self)
        if self.tokenizer is not None and self.vocabulary != type(self).vocabulary:
            raise ClearheadError(
                f"vocabulary has no effect beside the tokenizer {self.tokenizer!r}: leave one out"
            )

    @property
    def cache_folder(self) -> Path:
        """The folder for downloads and tokenised text."""
        if self.cache is not None:
            return Path(self.cache)
        return Path(os.environ.get("CLEARHEAD_CACHE") or "~/.cache/clearhead").expanduser()
