"""Multiple choice from local files, as tasks generated for the lm-evaluation-harness (lm-eval).

The fields of a row decide its prompt, which is lm-eval's for that data set:

    hellaswag: activity_label, context, choices, label
    question (arc_easy, arc_challenge, piqa): question, choices, label
    winogrande: sentence with a blank `_`, choices, label
    boolq: passage, question, label (0 no, 1 yes)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from clearhead.data.readers import json_rows
from clearhead.errors import ClearheadError, require
from clearhead.eval.harness import evaluate_tasks, metrics_of, quiet
from clearhead.eval.harness_tasks import EXTRA
from clearhead.eval.options import ChoicesOptions
from clearhead.eval.task import EvalTask, check_count, check_files, file_digest
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.intervals import wilson
from clearhead.records.runs import Line

# Form → the texts that its rows have, beside choices (BoolQ's are no and yes) and label.
_FORMS = {
    "boolq": ("passage", "question"),
    "winogrande": ("sentence",),
    "question": ("question",),
    "hellaswag": ("activity_label", "context"),
}
# Columns of the documents that lm-eval reads. Where `doc_to_text` is a number, the choices are the
# contexts, and the target is what continues each of them.
_ANSWERS = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "label"}
_CONTEXTS = {"doc_to_text": "label", "doc_to_choice": "choices", "doc_to_target": "query"}


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Multiple-choice questions of one prompt form.

    Attributes:
        form: hellaswag, question, winogrande or boolq.
        documents: rows for lm-eval: `query`, `choices` and `label`, the index of the right choice.
    """

    form: str
    documents: tuple[dict[str, Any], ...]

    @property
    def chance(self) -> float:
        """The accuracy of guessing: the mean of 1 / choices."""
        return sum(1 / len(one["choices"]) for one in self.documents) / len(self.documents)

    def config(self) -> dict[str, Any]:
        """The generated task, as a task file of lm-eval would define it."""
        by_length = self.form in ("hellaswag", "question")
        return {
            "task": self.form,
            "custom_dataset": self._splits,
            "test_split": "test",
            "output_type": "multiple_choice",
            **(_CONTEXTS if self.form == "winogrande" else _ANSWERS),
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True}
                for name in (["acc", "acc_norm"] if by_length else ["acc"])
            ],
        }

    def _splits(self, **_options: Any) -> dict[str, Any]:
        return {"test": require("datasets", EXTRA).Dataset.from_list(list(self.documents))}


def load_questions(path: Path, limit: int | None) -> Questions:
    """The questions of a .jsonl or .jsonl.gz file, the first `limit` of them.

    Raises:
        ClearheadError: a row without the fields of a form, naming it and its fields; rows of
            several forms, or none.
    """
    rows = islice(json_rows(path), limit)
    found = [_document(row if isinstance(row, dict) else {}, where) for where, row in rows]
    forms = dict.fromkeys(form for form, _ in found)
    if len(forms) != 1:
        raise ClearheadError(
            f"{path} has items of {' and '.join(forms) or 'no form'}: give a file for each, with a "
            f"row a line that has {_fields()}"
        )
    return Questions(form=found[0][0], documents=tuple(document for _, document in found))


def accuracy(
    model: Any,
    tokenizer: Any,
    questions: Questions,
    *,
    batch_tokens: int = 1,
    advanced: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Accuracies of a causal language model, by the highest log-likelihood of a choice.

    Args:
        batch_tokens: tokens in a batch; unless given, every answer is read alone, so that a
            quantiser's dynamic scale is that of one text.
        advanced: called with the number of rows scored.

    Returns:
        `accuracy` and, where lm-eval has it, `accuracy_norm` (log-likelihoods divided by the
        answers' characters), each with `NAME_stderr` for two questions or more; `items`; `chance`;
        `requests_cut`, the answers whose prompt lost its beginning, being too long for the model.

    Raises:
        ClearheadError: lm-eval is not installed, or cannot ask these questions.
    """
    make = require("lm_eval.api.task", EXTRA).ConfigurableTask
    with quiet():
        tasks = {"tasks": {questions.form: make(config=questions.config())}}
    found = evaluate_tasks(
        model, tokenizer, tasks, "choices", batch_tokens=batch_tokens, advanced=advanced
    )
    results = metrics_of(found["results"][questions.form])
    return {
        **{re.sub("^acc", "accuracy", key): value for key, value in results.items()},
        "items": len(questions.documents),
        "chance": questions.chance,
        "requests_cut": found["requests_cut"],
    }


class ChoicesTask(EvalTask, ChoicesOptions):
    drawn = False
    headlines = ("accuracy", "accuracy_norm")

    def cells(self, subject: Subject) -> list[Cell]:
        check_files("choices", self.files, "hellaswag.jsonl")
        if self.limit is not None:
            check_count(limit=self.limit)
        require("lm_eval.api.task", EXTRA)
        for file in self.files:
            load_questions(Path(file), self.limit)
        return [{"file": Path(file).name, "digest": file_digest(Path(file))} for file in self.files]

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        """The accuracies, with a 95 % interval from `low` to `high`."""
        (path,) = [Path(file) for file in self.files if Path(file).name == cell["file"]]
        questions = load_questions(path, self.limit)
        found = accuracy(
            subject.model,
            subject.tokenizer,
            questions,
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        )
        low, high = wilson(round(found["accuracy"] * found["items"]), found["items"])
        return {**found, "low": low, "high": high, "prompt": questions.form}


def _document(row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The prompt form of a row, and its document for lm-eval."""
    form = next((one for one, needs in _FORMS.items() if all(map(row.get, needs))), "")
    choices: Any = ["no", "yes"] if form == "boolq" else row.get("choices")
    texts = [row[name] for name in _FORMS.get(form, ())]
    many = isinstance(choices, list) and len(choices) > 1
    if not many or not texts or not all(isinstance(x, str) and x for x in (*texts, *choices)):
        raise ClearheadError(f"{where} lacks some of {_fields()}; it has {', '.join(row)}")
    label = row.get("label")
    if type(label) is not int or not 0 <= label < len(choices):
        raise ClearheadError(
            f"{where}: label is {label!r}, and the {len(choices)} choices count from 0"
        )
    query = f"Question: {texts[-1]}\nAnswer:"
    if form == "boolq":
        query = f"{texts[0]}\nQuestion: {texts[1]}?\nAnswer:"
    elif form == "winogrande":
        before, _, after = texts[0].partition("_")
        query, choices = after.strip(), [before + choice for choice in choices]
        if not query:
            raise ClearheadError(f"{where}: its sentence has no blank _ with words after it")
    elif form == "hellaswag":
        query, *choices = (_cleaned(text) for text in (": ".join(texts), *choices))
        if not all(choices):
            raise ClearheadError(f"{where}: nothing is left of a choice without its [marks]")
    return form, {"query": query, "choices": choices, "label": label}


def _fields() -> str:
    return " or ".join(", ".join(needs) for needs in _FORMS.values()) + ", choices and label"


def _cleaned(text: str) -> str:
    """Text without WikiHow's marks, as lm-eval cleans HellaSwag: double spaces once."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
