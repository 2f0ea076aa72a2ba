"""The cost of few bits as a task of a sweep: a cell for full precision, and one for each scheme."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clearhead.data import windows
from clearhead.errors import ClearheadError
from clearhead.eval import load_questions
from clearhead.eval.options import LISTED
from clearhead.eval.task import file_digest
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.quantize.linear import linear_layers
from clearhead.quantize.measure import CALIBRATION, Texts, cost
from clearhead.quantize.schemes import Scheme
from clearhead.records.cells import of_items
from clearhead.records.runs import Line

# Of lm-eval's questions: by log-likelihood, raw and divided by the answers' characters.
_ACCURACIES = {"accuracy": "accuracy", "accuracy_norm": "accuracy_normalised"}


@dataclass(frozen=True, kw_only=True)
class QuantizationTask:
    """Perplexity under each scheme, and the accuracy on questions where some are given.

    Attributes:
        length: tokens in a window.
        choices: a file of questions; the first `questions` of them are asked.
    """

    schemes: tuple[Scheme, ...] = field(metadata=LISTED)
    length: int
    choices: Path | None = field(metadata=LISTED)  # its digest tells which they were
    questions: int
    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        linear_layers(subject.model)  # refuses what is quantised already
        self.texts(subject)  # refuses what is too short, or no question
        digest = {} if self.choices is None else {"digest": file_digest(self.choices)}
        return [digest, *({"scheme": one.name, **digest} for one in self.schemes)]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> Iterable[Line]:
        scheme = next((one for one in self.schemes if one.name == cell.get("scheme")), None)
        found = cost(subject.model, scheme, self.texts(subject))
        if scheme is None and found.perplexity is None:
            raise ClearheadError(f"in full precision: {found.reason}")
        family = {} if scheme is None else {"family": scheme.family, "bits": scheme.bits}
        details = {**family, "predicted_tokens": found.tokens, "unused": list(found.unused)}
        if found.perplexity is None:
            return [{"metric": "perplexity", "value": None, "reason": found.reason, **details}]
        lines = [of_items("perplexity", found.perplexity, found.by_window, **details)]
        answers = found.answers
        for name, metric in _ACCURACIES.items():
            if name in answers:
                asked = {"questions": answers["items"], "chance": answers["chance"]}
                error = {"stderr": answers.get(f"{name}_stderr")}
                lines.append({"metric": metric, "value": answers[name], **error, **family, **asked})
        return lines

    def texts(self, subject: Subject) -> Texts:
        """Windows of the validation split and, where a scheme is calibrated, of the training split
        for its scales; the questions.

        Raises:
            ClearheadError: a split is shorter than a window.
        """
        corpus, count = subject.texts.corpus, max(1, subject.tokens // self.length)
        calibrated = any(x.activations and x.activations.scale == "channel" for x in self.schemes)
        return Texts(
            windows=list(windows(corpus, length=self.length, count=count, seed=subject.seed)),
            calibration=list(
                windows(corpus, split="train", length=self.length, count=CALIBRATION)
                if calibrated
                else ()
            ),
            questions=None
            if self.choices is None
            else load_questions(self.choices, self.questions),
            tokenizer=subject.tokenizer,
        )
