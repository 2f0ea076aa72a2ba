"""What text to learn from and how it becomes tokens."""

import os
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus of a run.

    Attributes:
        data: sources, each "SPEC" or "SPEC@WEIGHT", where SPEC is `python-stdlib`,
            `python-packages`, a file, a folder, `hf:name[:config][#split]` or
            `synthetic:task[:key=value,…]` (passkey, needle, recall, backcopy). All have a weight,
            or none has: then every token of every source counts alike. One without a weight takes
            what the others leave of 1.
        tokenizer: folder or hub name of an existing tokenizer; None trains a byte-level BPE.
        vocabulary: entries of the trained tokenizer, the 256 bytes and 3 special ones included.
        text_field: the field of a .jsonl, .parquet or hub row that holds its text.
        validation: share of the documents held out, chosen by a hash of their text.
        limit: bytes of text (as UTF-8) after which a source stops; None takes it whole.
        cache: folder of the tokens; None is $CLEARHEAD_CACHE, or else ~/.cache/clearhead.

    Raises:
        ClearheadError: at construction, where a value cannot work.
    """

    data: tuple[str, ...] = ("python-stdlib",)
    tokenizer: str | None = None
    vocabulary: int = 4096
    text_field: str = "text"
    validation: float = 0.02
    limit: int | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, str) or not self.data:
            raise ClearheadError(
                f"data is {self.data!r}: give a tuple of one source or more, "
                "for example ('python-stdlib',)"
            )
        if not 0 < self.validation < 1:
            raise ClearheadError(
                f"validation is {self.validation}: it is a share of the documents, "
                "between 0 and 1, for example 0.02"
            )
        if self.limit is not None and self.limit <= 0:
            raise ClearheadError(
                f"limit is {self.limit}: give a number of bytes above 0, or none to take everything"
            )

    @property
    def cache_folder(self) -> Path:
        """The folder that holds what is downloaded and tokenised."""
        if self.cache is not None:
            return Path(self.cache)
        return Path(os.environ.get("CLEARHEAD_CACHE") or "~/.cache/clearhead").expanduser()
