"""Multiple choice from local files, as tasks generated for the lm-evaluation-harness (lm-eval).

The fields of a row decide its prompt, which is lm-eval's for that data set:

    hellaswag: activity_label, context, choices, label
    question (arc_easy, arc_challenge, piqa): question, choices, label
    winogrande: sentence with a blank `_`, choices, label
    boolq: passage, question, label (0 no, 1 yes)
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.readers import json_rows
from clearhead.errors import ClearheadError, require
from clearhead.eval.harness import evaluate_tasks, metrics_of, quiet
from clearhead.eval.harness_tasks import EXTRA
from clearhead.eval.options import ChoicesOptions
from clearhead.eval.task import EvalTask, Subject, check_count, check_files, file_digest
from clearhead.measure.task import Advanced, Cell
from clearhead.records.intervals import wilson
from clearhead.records.runs import Line

NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
_FORMS = (
    "activity_label, context (HellaSwag), question (ARC, PIQA) or sentence (WinoGrande), each with "
    "choices and label; or passage, question and label (BoolQ)"
)
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
    form, documents = "", list[dict[str, Any]]()
    for where, row in json_rows(path):
        name, document = _document(row, where)
        if documents and name != form:
            raise ClearheadError(
                f"{where} is an item of {name}, and {path.name} begins with items of {form}: give "
                "a file for each"
            )
        form = name
        documents.append(document)
        if len(documents) == limit:
            break
    if not documents:
        raise ClearheadError(f"{path} has no items: give a row a line, with {_FORMS}")
    return Questions(form=form, documents=tuple(documents))


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
        **{_renamed(key): value for key, value in results.items()},
        "items": len(questions.documents),
        "chance": questions.chance,
        "requests_cut": found["requests_cut"],
    }


class ChoicesTask(EvalTask, ChoicesOptions):
    drawn = False
    headlines = tuple(NAMES.values())

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


def _renamed(metric: str) -> str:
    plain = metric.removesuffix("_stderr")
    return NAMES[plain] + metric[len(plain) :]


def _document(row: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The prompt form of a row, and its document for lm-eval."""
    if not isinstance(row, dict):
        raise ClearheadError(f"{where} is no object of fields")
    if "passage" in row:
        passage, question = _texts(row, where, "passage", "question")
        query, choices = f"{passage}\nQuestion: {question}?\nAnswer:", ["no", "yes"]
        return "boolq", {"query": query, "choices": choices, "label": _label(row, 2, where)}
    choices = row.get("choices", [])
    if not isinstance(choices, list) or len(choices) < 2:
        raise _lacks(row, where)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise _lacks(row, where)
    if "sentence" in row:
        form = "winogrande"
        (sentence,) = _texts(row, where, "sentence")
        before, blank, after = sentence.partition("_")
        query, choices = after.strip(), [before + choice for choice in choices]
        if not blank or not query:
            raise ClearheadError(f"{where}: its sentence has no blank _ with words after it")
    elif "question" in row:
        form = "question"
        (question,) = _texts(row, where, "question")
        query = f"Question: {question}\nAnswer:"
    else:
        form = "hellaswag"
        query = _cleaned(": ".join(_texts(row, where, "activity_label", "context")))
        choices = [_cleaned(choice) for choice in choices]
        if not all(choices):
            raise ClearheadError(f"{where}: nothing is left of a choice without its [marks]")
    return form, {"query": query, "choices": choices, "label": _label(row, len(choices), where)}


def _texts(row: Mapping[str, Any], where: str, *names: str) -> list[str]:
    found = [row.get(name) for name in names]
    if not all(isinstance(text, str) and text for text in found):
        raise _lacks(row, where)
    return [str(text) for text in found]


def _lacks(row: Mapping[str, Any], where: str) -> ClearheadError:
    return ClearheadError(f"{where} lacks some of {_FORMS}; it has {', '.join(row) or 'nothing'}")


def _label(row: Mapping[str, Any], choices: int, where: str) -> int:
    if "label" not in row:
        raise ClearheadError(
            f"{where} lacks label, the number of the right choice from 0; it has {', '.join(row)}"
        )
    label = row["label"]
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < choices:
        raise ClearheadError(f"{where}: label is {label!r}, and the {choices} choices count from 0")
    return label


def _cleaned(text: str) -> str:
    """Text without WikiHow's marks, as lm-eval cleans HellaSwag: double spaces once."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
