"""Multi-hop, ordering and arithmetic puzzles (`clearhead.data.puzzles`), answered by writing.

An answer counts where the words that the model writes, up to the first stop, are the puzzle's;
Brevo's in any order that is allowed. `chance` is the mean over the puzzles of what a guess would
get that knows the kind of the answer.
"""

from abc import abstractmethod
from collections.abc import Iterator
from statistics import fmean
from typing import ClassVar

from clearhead.data.puzzles import Question, brevo, depo, mano
from clearhead.data.seeded_choices import SeededChoices
from clearhead.eval.options import BrevoOptions, DepoOptions, ManoOptions
from clearhead.eval.prefill import Prompt
from clearhead.eval.task import EvalTask, Subject, check_count
from clearhead.measure.task import Advanced, Cell
from clearhead.records.runs import Line


class _Puzzles(EvalTask):
    """The protocol of all three: cells of single puzzles, each with one question."""

    headlines = ("accuracy",)
    name: ClassVar[str]
    samples: int

    def cells(self, subject: Subject) -> list[Cell]:
        check_count(samples=self.samples)
        found: list[Cell] = [*self._cells()]
        for cell in found:
            given, question = self._puzzle(SeededChoices("any"), cell)
            written = f"{given}{question.text} {' '.join(question.answer)}."
            subject.check_length(len(subject.ids(written)[0]))
        return found

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        label = f"{self.name} {subject.seed} {' '.join(map(str, cell.values()))}"
        puzzles = [
            self._puzzle(SeededChoices(f"{label} {number}"), cell) for number in range(self.samples)
        ]
        texts = [
            subject.ids(given, question.text, f" {' '.join(question.answer)}.")
            for given, question in puzzles
        ]
        prompts = [Prompt(given, question) for given, question, _ in texts]
        answers = [answer for *_, answer in texts]
        found = subject.reader.ask(
            prompts, answers, new_tokens=max(map(len, answers)), advanced=advanced
        )
        solved = [
            question.solved_by(subject.decode(answer.written).partition(".")[0].split())
            for answer, (_, question) in zip(found, puzzles, strict=True)
        ]
        return {
            "accuracy": fmean(solved),
            "accuracy_by_item": [float(one) for one in solved],
            "chance": fmean(question.chance for _, question in puzzles),
            "answer_loss": fmean(sum(answer.loss) for answer in found),
            "trials": self.samples,
        }

    @abstractmethod
    def _cells(self) -> Iterator[Cell]: ...

    @abstractmethod
    def _puzzle(self, draws: SeededChoices, cell: Cell) -> tuple[str, Question]: ...


class DepoTask(_Puzzles, DepoOptions):
    """Successors in a cycle, by hops."""

    name = "depo"

    def _cells(self) -> Iterator[Cell]:
        return ({"vertices": self.vertices, "hops": hops} for hops in self.hops)

    def _puzzle(self, draws: SeededChoices, cell: Cell) -> tuple[str, Question]:
        given, (question,) = depo(draws, cell["vertices"], [cell["hops"]], evaluation=True)
        return given, question


class BrevoTask(_Puzzles, BrevoOptions):
    """All that a vertex needs, in an order that is allowed, by vertices."""

    name = "brevo"

    def _cells(self) -> Iterator[Cell]:
        return ({"vertices": vertices} for vertices in self.vertices)

    def _puzzle(self, draws: SeededChoices, cell: Cell) -> tuple[str, Question]:
        given, (question,) = brevo(draws, cell["vertices"], evaluation=True)
        return given, question


class ManoTask(_Puzzles, ManoOptions):
    """Formulas modulo 23, by operations."""

    name = "mano"

    def _cells(self) -> Iterator[Cell]:
        return ({"operations": operations} for operations in self.operations)

    def _puzzle(self, draws: SeededChoices, cell: Cell) -> tuple[str, Question]:
        return "", mano(draws, cell["operations"], evaluation=True)
