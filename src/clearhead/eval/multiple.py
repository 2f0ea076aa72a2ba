"""Multiple choice from local files, with the lm-evaluation-harness's prompts and scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from clearhead.diagnose.running import longest_text
from clearhead.errors import ClearheadError
from clearhead.eval.continuations import encode_pairs, log_likelihoods
from clearhead.eval.identity import check_files, file_digest
from clearhead.eval.items import load_items
from clearhead.eval.task import Advanced, Cell, Subject, wilson


@dataclass(frozen=True, kw_only=True)
class ChoicesTask:
    """Multiple choice from files: HellaSwag, ARC, PIQA, WinoGrande, BoolQ, as lm-eval asks them."""

    headlines: ClassVar[tuple[str, ...]] = ("accuracy", "accuracy_norm")

    files: tuple[str, ...] = ()
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
        pairs = [pair for item in items for pair in item.pairs]
        rows = iter(encode_pairs(subject.tokenizer, pairs, _limit(subject.model)))
        scores = log_likelihoods(
            subject.model,
            subject.reader.prefill,
            [[next(rows) for _ in item.pairs] for item in items],
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        )
        right = sum(_best(row) == item.label for item, row in zip(items, scores, strict=True))
        low, high = wilson(right, len(items))
        found = {
            "accuracy": right / len(items),
            "low": low,
            "high": high,
            "items": len(items),
            "chance": sum(1 / len(item.pairs) for item in items) / len(items),
            "prompt": items[0].form,
        }
        normalised = [
            _best([score / length for score, length in zip(row, item.lengths, strict=True)])
            == item.label
            for item, row in zip(items, scores, strict=True)
            if item.lengths is not None
        ]
        if normalised:
            found["accuracy_norm"] = sum(normalised) / len(normalised)
        return found


def _best(scores: list[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=scores.__getitem__)


def _limit(model: Any) -> int | None:
    """Tokens that are read at once, as the harness has it; what follows the trained length too."""
    return getattr(model.config, "max_position_embeddings", None) or longest_text(model)
