"""The subject of evaluations, their tasks, and checks of options and files."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError, NotFinite
from clearhead.eval.answers import Reader, ends_of
from clearhead.eval.rope_limits import check_length
from clearhead.measure import task
from clearhead.measure.task import Advanced, Cell
from clearhead.records.cells import lines_of, unmeasured
from clearhead.records.files import sha256_of
from clearhead.records.runs import Line


@dataclass(frozen=True, kw_only=True)
class Subject(task.Subject):
    """A causal language model under evaluation, with a fast tokenizer, and its text."""

    @cached_property
    def reader(self) -> Reader:
        """Reads prompts; caches their common prefix."""
        ends = ends_of(self.model, self.tokenizer)
        return Reader(self.model, batch_tokens=self.batch_tokens, ends=ends)

    def check_length(self, length: int) -> None:
        """Refuse texts of so many tokens, answer included, that the model has no positions for."""
        check_length(self.model, length)

    def release(self) -> None:
        """Drop the reader and its cache."""
        self.__dict__.pop("reader", None)

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

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer without special tokens."""
        return Encoder(self.tokenizer)


class EvalTask(ABC):
    """A task of `clearhead eval`; its other base says what it measures, and has its options.

    Attributes:
        headlines: the numbers of a cell that tables show.
    """

    drawn: ClassVar[bool] = True
    headlines: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def cells(self, subject: Subject) -> list[Cell]:
        """As `clearhead.measure.Task`."""

    @abstractmethod
    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        """The numbers of one cell, and what `lines_of` takes besides."""

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> list[Line]:
        """The lines of one cell; prompts that are cut are shown."""
        try:
            result = self.result(subject, cell, advanced)
        except NotFinite as error:
            return unmeasured(self.headlines, error)
        cut = ["requests_cut"] if result.get("requests_cut") else []
        return lines_of([*self.headlines, *cut], result)


def parted(words: Sequence[str]) -> list[str]:
    """Split words at commas; each word once."""
    return list(dict.fromkeys(filter(None, (one for word in words for one in word.split(",")))))


def by_depth(lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """A cell for each length and depth: of growing depths, as filler that is cached only grows.

    Raises:
        ClearheadError: no depths, or some outside 0 to 1.
    """
    if not depths or any(not 0 <= depth <= 1 for depth in depths):
        raise ClearheadError(
            f"depths are {' '.join(map(str, depths)) or 'none'}: each is a share of the text "
            "before what is hidden, from 0 to 1"
        )
    return [{"length": length, "depth": depth} for length in lengths for depth in sorted(depths)]


def check_count(**counts: int) -> None:
    """Refuse counts below 1, by name."""
    for name, count in counts.items():
        if count < 1:
            raise ClearheadError(f"{name} is {count}: at least 1")


def file_digest(path: Path) -> str:
    """A hash of a file's bytes, as 12 hex digits."""
    return sha256_of(path)[:12]


def check_files(task: str, files: Sequence[str], example: str) -> None:
    """Refuse an empty list of files, and two files of one name: tables name them so."""
    if not files:
        raise ClearheadError(f"{task} needs files: for example --{task}.files {example}")
    names = Counter(Path(file).name for file in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ClearheadError(f"two files are called {twice[0]}: tables name them so; rename one")
