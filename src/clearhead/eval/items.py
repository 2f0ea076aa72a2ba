"""Multiple choice in the prompts of EleutherAI's lm-evaluation-harness (0.4), from files.

The fields of a row tell which prompt it takes:

    hellaswag: activity_label, context, choices, label
    question (arc_easy, arc_challenge, piqa): question, choices, label
    winogrande: sentence with a blank `_`, choices, label
    boolq: passage, question, label (0 no, 1 yes)
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.readers import json_rows
from clearhead.errors import ClearheadError

_FORMS = (
    "activity_label, context (HellaSwag), question (ARC, PIQA) or sentence (WinoGrande), each with "
    "choices and label; or passage, question and label (BoolQ)"
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question: `pairs` of a context and what continues it, one a choice.

    form: the prompt it took. label: the index of the right pair. lengths: of the answers in
    characters, by which the harness normalises; None where it does not.
    """

    form: str
    pairs: tuple[tuple[str, str], ...]
    label: int
    lengths: tuple[int, ...] | None


def load_items(path: Path, limit: int | None) -> list[Item]:
    """The items of a .jsonl or .jsonl.gz file, the first `limit` of them.

    Raises:
        ClearheadError: a row without these fields, naming it and what it has; rows of several
            forms, or none.
    """
    items: list[Item] = []
    for where, row in _rows(path):
        item = _item(row, where)
        if items and item.form != items[0].form:
            raise ClearheadError(
                f"{where} is an item of {item.form}, and those before are of {items[0].form}: "
                "give a file for each"
            )
        items.append(item)
        if len(items) == limit:
            break
    if not items:
        raise ClearheadError(f"{path} has no items: give a row a line, with {_FORMS}")
    return items


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a .jsonl or .jsonl.gz file, each with its place.

    Raises:
        ClearheadError: a file of another kind.
    """
    for where, row in json_rows(path):
        if not isinstance(row, dict):
            raise ClearheadError(f"{where} is no object of fields")
        yield where, row


def _item(row: Mapping[str, Any], where: str) -> Item:
    if "passage" in row:
        passage, question = _texts(row, where, "passage", "question")
        return _continued("boolq", f"{passage}\nQuestion: {question}?", ("no", "yes"), row, where)
    choices = row.get("choices")
    good = isinstance(choices, list) and len(choices) > 1
    if not good or not all(isinstance(choice, str) and choice for choice in choices or ()):
        raise _lacks(row, where)
    assert isinstance(choices, list)
    if "sentence" in row:
        (sentence,) = _texts(row, where, "sentence")
        before, blank, after = sentence.partition("_")
        if not blank or not after.strip():
            raise ClearheadError(f"{where}: its sentence has no blank _ with words after it")
        return Item(
            form="winogrande",
            pairs=tuple((before + choice, f" {after.strip()}") for choice in choices),
            label=_label(row, len(choices), where),
            lengths=None,
        )
    if "question" in row:
        (question,) = _texts(row, where, "question")
        return _continued("question", f"Question: {question}", choices, row, where)
    topic, context = _texts(row, where, "activity_label", "context")
    pairs = [(_cleaned(f"{topic}: {context}"), _cleaned(choice)) for choice in choices]
    if not all(ending for _, ending in pairs):
        raise ClearheadError(f"{where}: nothing is left of a choice without its [marks]")
    return Item(
        form="hellaswag",
        pairs=tuple((context, f" {ending}") for context, ending in pairs),
        label=_label(row, len(choices), where),
        lengths=tuple(len(ending) for _, ending in pairs),
    )


def _continued(form: str, asked: str, answers: Any, row: Mapping[str, Any], where: str) -> Item:
    return Item(
        form=form,
        pairs=tuple((f"{asked}\nAnswer:", f" {answer}") for answer in answers),
        label=_label(row, len(answers), where),
        lengths=None if form == "boolq" else tuple(map(len, answers)),
    )


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
    """As the harness cleans HellaSwag of WikiHow's marks, double spaces once."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
