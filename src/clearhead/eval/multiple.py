"""Multiple choice from local files, with the lm-evaluation-harness's prompts and scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from clearhead.diagnose.running import longest_text
from clearhead.errors import ClearheadError
from clearhead.eval.continuations import encode_pairs, log_likelihoods
from clearhead.eval.identity import check_files, file_digest
from clearhead.eval.items import Item, load_items
from clearhead.eval.prefill import Prefill
from clearhead.eval.task import LISTED, Advanced, Cell, Subject, wilson


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How many of `items` were answered right, by the largest log-likelihood of an answer.

    Attributes:
        right: by the sum over the answer's tokens (the harness's acc).
        right_by_length: by that sum over the answer's characters (its acc_norm); None where the
            harness has none.
        chance: the share that guessing gives, the mean of 1 / choices.
    """

    items: int
    right: int
    right_by_length: int | None
    chance: float


def accuracy(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    prefill: Prefill | None = None,
    batch_tokens: int = 1,
    advanced: Callable[[int], None] = lambda count: None,
) -> Accuracy:
    """How often a causal language model chooses right.

    Args:
        items: of one form.
        prefill: of the model; unless given, each answer is read with its question, whole and alone,
            so that a quantiser's dynamic scale is that of one text.
        batch_tokens, advanced: as in `log_likelihoods`.

    Raises:
        ClearheadError: an answer longer than the model can read, or one whose likelihood is NaN.
    """
    pairs = [pair for item in items for pair in item.pairs]
    rows = iter(encode_pairs(tokenizer, pairs, _limit(model)))
    scores = log_likelihoods(
        model,
        prefill or Prefill(model, share=False),
        [[next(rows) for _ in item.pairs] for item in items],
        batch_tokens=batch_tokens,
        advanced=advanced,
    )
    by_length = [
        _best([score / length for score, length in zip(row, item.lengths, strict=True)])
        == item.label
        for item, row in zip(items, scores, strict=True)
        if item.lengths is not None
    ]
    return Accuracy(
        items=len(items),
        right=sum(_best(row) == item.label for item, row in zip(items, scores, strict=True)),
        right_by_length=sum(by_length) if by_length else None,
        chance=sum(1 / len(item.pairs) for item in items) / len(items),
    )


@dataclass(frozen=True, kw_only=True)
class ChoicesTask:
    """Multiple choice from files: HellaSwag, ARC, PIQA, WinoGrande, BoolQ, as lm-eval asks them."""

    headlines: ClassVar[tuple[str, ...]] = ("accuracy", "accuracy_norm")

    files: tuple[str, ...] = field(default=(), metadata=LISTED)
    """.jsonl or .jsonl.gz, a cell each; the fields of the rows tell the prompt."""
    limit: int | None = None
    """Items of each file, its first; unless given, all."""

    def cells(self, subject: Subject) -> list[Cell]:
        check_files("choices", self.files, "hellaswag.jsonl")
        if self.limit is not None and self.limit < 1:
            raise ClearheadError(f"limit is {self.limit}: at least 1")
        limit = _limit(subject.model)
        for file in self.files:
            for item in load_items(Path(file), self.limit):
                # No tokenizer gives more tokens than bytes: only long answers can be too long.
                if limit is not None and max(len(a.encode()) for _, a in item.pairs) > limit:
                    encode_pairs(subject.tokenizer, item.pairs, limit)
        return [{"file": Path(file).name, "digest": file_digest(Path(file))} for file in self.files]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> dict[str, Any]:
        """`accuracy` by the sum of log-likelihoods, `accuracy_norm` divided by characters first."""
        (path,) = [Path(file) for file in self.files if Path(file).name == cell["file"]]
        items = load_items(path, self.limit)
        answers = accuracy(
            subject.model,
            subject.tokenizer,
            items,
            prefill=subject.reader.prefill,
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        )
        low, high = wilson(answers.right, answers.items)
        found = {
            "accuracy": answers.right / answers.items,
            "low": low,
            "high": high,
            "items": answers.items,
            "chance": answers.chance,
            "prompt": items[0].form,
        }
        if answers.right_by_length is not None:
            found["accuracy_norm"] = answers.right_by_length / answers.items
        return found


def _best(scores: list[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=scores.__getitem__)


def _limit(model: Any) -> int | None:
    """Tokens that are read at once, as the harness has it; what follows the trained length too."""
    return getattr(model.config, "max_position_embeddings", None) or longest_text(model)
