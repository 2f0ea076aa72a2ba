"""A diagnosis as a task of a sweep."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from clearhead.data import windows
from clearhead.diagnose.diagnosis import diagnose, with_extrapolation
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.runs import Line


@dataclass(frozen=True, kw_only=True)
class DiagnosisTask:
    """All that is measured of one model on windows of text, and on one longer text: one cell.

    Attributes:
        length: tokens in a window. windows: their number, at most. at: where they start.
        extrapolate: length of the longer text, in training lengths; 1 for none.
        trained_length: the training length, where the configuration's is another.
    """

    length: int
    windows: int
    at: Literal["anywhere", "documents"]
    extrapolate: float
    trained_length: int | None
    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        self._texts(subject)
        return [{}]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> Iterable[Line]:
        size = max(1, subject.batch_tokens // self.length)
        texts, corpus, seed = list(self._texts(subject)), subject.texts.corpus, subject.seed
        found = diagnose(subject.model, texts, batch_size=size, progress=lambda: advanced(size))
        if self.extrapolate > 1:
            found = with_extrapolation(
                found,
                subject.model,
                lambda tokens: next(iter(windows(corpus, length=tokens, count=1, seed=seed))),
                trained=self.trained_length,
                factor=self.extrapolate,
            )
        return found.records()

    def number(self, subject: Subject) -> int:
        """The number of windows that the text holds, of those asked for."""
        return sum(1 for _ in self._texts(subject))

    def _texts(self, subject: Subject) -> Iterable[Tensor]:
        return windows(
            subject.texts.corpus,
            length=self.length,
            count=self.windows,
            at=self.at,
            seed=subject.seed,
        )
