"""Evaluations on a page: a section a task, with tables and curves by length."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from clearhead.records.runs import DIMENSIONS, Measure, Records
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.page import Panel, Section
from clearhead.report.pivots import Cell, Heading, Pivot, Quantity, by_arm, models, pivot
from clearhead.report.statistics import LEVEL

PLAIN = "none"  # the scaling that a curve shows
FEW = 3  # models whose scalings a chart by length shows too
DOCUMENTS = "document_perplexity"
CAPTION = (
    "Above the lengths stand the scaling of the rotary frequencies and the setting; numbers are "
    "means over depths{}. Under a number stands its difference to the first model’s{}; the error "
    "of drawing keys or documents is in its interval where records have them singly."
)
SEEDS = (" and seeds", ", by Welch’s t over seeds")
_READ = ("perplexity", "hits", "masked")  # tasks whose number is one of the text
# Dimensions that name no setting: the length, and what only decides which text is read.
_SILENT = ("task", "scaling", "factor", "length", "longest", "depth")
_OF_A_LINE = ("task", "scaling", "factor", "length")  # dimensions that a chart tells apart


def tasks(records: Records) -> dict[str, list[str]]:
    """The metrics of each task that any run has measured, in order."""
    metrics: dict[str, dict[str, None]] = {}
    for one in (one for run in records.runs for one in run.measures.values()):
        task = one.dimensions.get("task")
        shown = one.metric != DOCUMENTS and not one.details.get("aside")
        if task is not None and (one.value is not None or one.not_finite) and shown:
            metrics.setdefault(str(task), {})[one.metric] = None
    return {task: list(names) for task, names in metrics.items()}


def numbers(records: Records, task: str, metric: str, *apart: str) -> list[Quantity]:
    """The numbers of a task's metric by setting and length, over depths unless they are `apart`."""
    several = len(records.dimension(metric, "longest", task=task)) > 1
    apart = (*apart, *["longest"] * several)
    names = [one for one in DIMENSIONS if one in apart or one not in ("depth", "longest")]
    measures = [one for run in records.runs for one in run.select(metric, task=task)]
    settings = _by_length(measures, names, partial(setting, apart=apart)).values()
    quantities = [number for by_length in settings for number in by_length.values()]
    for place, number in enumerate(quantities if metric == "accuracy" else ()):
        guess = replace(number, metric="chance", write=style.percent)
        if chances := [one for model in models(records) for one in guess.entries(model)]:
            quantities[place] = replace(number, note=f"chance {chances[0].text}")
    return quantities


def _by_length(
    measures: Iterable[Measure], names: Sequence[str], words: Callable[[Mapping[str, Any]], str]
) -> dict[str, dict[int, Quantity]]:
    """Numbers at the dimensions `names`, pooled over others, by setting in words and by length."""
    settings: dict[str, dict[int, Quantity]] = {}
    for one in measures:
        group, length = words(one.dimensions), one.dimensions.get("length", 0)
        at = {name: one.dimensions.get(name) for name in names}
        title = f"{length:,}" if length else ""
        number = Quantity(title, group, metric=one.metric, at=at, pooled=True)
        settings.setdefault(group, {}).setdefault(length, number)
    return {group: dict(sorted(numbers.items())) for group, numbers in settings.items()}


def table(records: Records, task: str, metric: str) -> Pivot | None:
    """A row a model, a column a setting and length."""
    columns, words = numbers(records, task, metric), metric.replace("_", " ")
    words += " by length in tokens" * any(one.title for one in columns)
    title = f"{task}, {words}{_of_text(records, task)}"
    return by_arm(records, title, columns, corner=words)


def one_model(records: Records) -> Pivot | None:
    """All numbers of one model in a table, depths apart: a row a setting, a column a length."""
    rows: dict[Heading, dict[str, Quantity]] = {}
    for task, metric in ((task, one) for task, ones in tasks(records).items() for one in ones):
        for number in numbers(records, task, metric, "depth"):
            words = f"{metric.replace('_', ' ')}, {number.group}"
            row = Heading(words, task + _of_text(records, task), number.note)
            rows.setdefault(row, {})[number.title] = number
    titles = {title for row in rows.values() for title in row}
    lengths = sorted(titles, key=lambda one: int(one.replace(",", "") or 0))
    columns = {Heading(one, model.group): model for model in models(records) for one in lengths}

    def cell(row: Heading, column: Heading) -> Cell:
        number = rows[row].get(column.title)
        return number.entries(columns[column]) if number else ()

    return pivot(records.arms()[0], rows, columns, cell, "by length" if any(lengths) else "")


def _of_text(records: Records, task: str) -> str:
    return narrative.text_in_words(records) if task in _READ else ""


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """A section for each task; of one model one table of all tasks."""
    caption = CAPTION.format(*(("", "") if records.given else SEEDS))
    alone = len(records.arms()) == 1
    if alone:
        yield Section("evaluation", "Evaluation", [one_model(records)])
    for task, metrics in tasks(records).items():
        tables = [table(records, task, one) for one in metrics if not alone]
        blocks = (*tables, _chart(records, looks, task, metrics[0]))
        yield Section(f"evaluation-{task}", f"Evaluation: {task}", blocks, caption)
        caption = ""


def verdict(records: Records, threshold: float = LEVEL) -> list[str]:
    """The first two tasks in a sentence each: the means at the longest length, without scaling."""
    sentences = []
    for task, (metric, *_) in tasks(records).items():
        longest = max(records.dimension(metric, "length", task=task), default=None)
        at: dict[str, Any] = {"task": task, "length": longest}
        at["scaling"] = PLAIN if records.dimension(metric, "scaling", **at) else None
        words = metric.replace("_", " ") + ("" if task == metric else f" of {task}")
        words += f" at {longest:,} tokens" if longest else ""
        words += _of_text(records, task)
        title = f"{words[:1].upper()}{words[1:]}"
        number = Quantity(title, metric=metric, at=at, pooled=True)
        sentences.append(narrative.answer(records, number, threshold=threshold))
    return [one for one in sentences if one][:2]


def setting(dimensions: Mapping[str, Any], apart: Sequence[str] = ()) -> str:
    """A cell's dimensions in words, without length and, unless in `apart`, depth and longest."""
    words = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
        for name, value in dimensions.items()
        if (name in apart or name not in _SILENT) and (name, value) != ("order", "random")
    ]
    return ", ".join([scaling_name(dimensions), *words])


def scaling_name(dimensions: Mapping[str, Any]) -> str:
    """A rope scaling in words: "none", "yarn × 4"."""
    factor = dimensions.get("factor")
    return str(dimensions.get("scaling", PLAIN)) + (f" × {factor:g}" if factor is not None else "")


def _chart(records: Records, looks: Looks, task: str, metric: str) -> Panel | None:
    """A line a model and scaling, over depths and settings of one text; of many models unscaled."""
    texts = records.dimension(metric, "longest", task=task)
    of_text = {"longest": texts[-1]} if len(texts) > 1 else {}
    few = len(records.arms()) <= FEW
    measures = [
        one
        for run in records.runs
        for one in run.select(metric, task=task, **of_text)
        if "length" in one.dimensions and (few or scaling_name(one.dimensions) == PLAIN)
    ]
    lines = _by_length(measures, (*_OF_A_LINE, *of_text), scaling_name)
    words = metric.replace("_", " ")
    title = f"{words[:1].upper()}{words[1:]} by length of text"
    note = "" if few else "Without scaling."
    return charts.by_length(records, looks, lines, title, words, note)
