"""Evaluations on a page: a section a task, with tables and curves by length.

A number is the mean over seeds, and over depths where several models stand side by side; ± is one
standard deviation over seeds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clearhead.records.runs import DIMENSIONS, Records
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.page import Panel, Section
from clearhead.report.pivots import Entry, Heading, Model, Pivot, Quantity, models, pivot
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
# Dimensions that name no row: the column, and what only decides which text is read.
_SILENT = ("task", "scaling", "factor", "length", "longest", "digest", "depth")
_BY_LENGTH = ("task", "scaling", "factor", "length")  # told apart by a curve
Places = dict[tuple[str, int], Quantity]  # by setting in words, and length


def tasks(records: Records) -> dict[str, list[str]]:
    """The metrics of each task that any run has measured, in order."""
    metrics: dict[str, dict[str, None]] = {}
    for one in (one for run in records.runs for one in run.measures.values()):
        task = one.dimensions.get("task")
        shown = one.metric != DOCUMENTS and not one.details.get("aside")
        if task is not None and (one.value is not None or one.not_finite) and shown:
            metrics.setdefault(str(task), {})[one.metric] = None
    return {task: list(names) for task, names in metrics.items()}


def _places(records: Records, task: str, metric: str, *apart: str) -> Places:
    """The numbers of a task's metric by setting (with the dimensions `apart`), length and, if there
    are several, text; a number's note is the accuracy of a guess."""
    places: Places = {}
    told = (*apart, *["longest"] * (len(records.dimension(metric, "longest", task=task)) > 1))
    names = [one for one in DIMENSIONS if one in told or one not in ("depth", "longest")]
    for one in (one for run in records.runs for one in run.select(metric, task=task)):
        place = setting(one.dimensions, told), one.dimensions.get("length", 0)
        at = {name: one.dimensions.get(name) for name in names}
        places.setdefault(place, Quantity("", metric=metric, at=at, pooled=True))
    for place, number in places.items() if metric == "accuracy" else ():
        guess = replace(number, metric="chance", write=style.percent)
        cells = [one for model in models(records) for one in guess.entries(model)]
        places[place] = replace(number, note=f"chance {cells[0].text}" if cells else "")
    return places


def table(records: Records, task: str, metric: str) -> Pivot | None:
    """A row a model, a column a setting and length."""
    places = _places(records, task, metric)
    lengths = sorted({length for _, length in places})
    words = metric.replace("_", " ") + " by length in tokens" * any(lengths)
    settings = {setting: number.note for (setting, _), number in places.items()}
    cells = (
        (model.heading, Heading(_tokens(length), one, note), places[one, length].entries(model))
        for model in models(records)
        for one, note in settings.items()
        for length in lengths
        if (one, length) in places
    )
    return pivot(f"{task}, {words}{_of_text(records, task)}", cells, words)


def one_model(records: Records) -> Pivot | None:
    """All numbers of one model in a table, depths apart: a row a setting, a column a length."""
    numbers = {
        (Heading(f"{metric.replace('_', ' ')}, {words}", task + text, one.note), length): one
        for task, metrics in tasks(records).items()
        for text in [_of_text(records, task)]
        for metric in metrics
        for (words, length), one in _places(records, task, metric, "depth").items()
    }
    rows = dict.fromkeys(row for row, _ in numbers)
    lengths = sorted({length for _, length in numbers})
    cells = (
        (
            row,
            Heading(_tokens(length), model.heading.group),
            _entries(numbers.get((row, length)), model),
        )
        for model in models(records)
        for row in rows
        for length in lengths
    )
    return pivot(records.arms()[0], cells, "by length" if any(lengths) else "")


def _entries(number: Quantity | None, model: Model) -> tuple[Entry, ...]:
    return () if number is None else number.entries(model)


def _tokens(length: int) -> str:
    return f"{length:,}" if length else ""


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """A section for each task; of one model one table of all tasks."""
    caption = CAPTION.format(*(("", "") if records.given else SEEDS))
    alone = len(records.arms()) == 1
    if alone:
        yield Section("evaluation", "Evaluation", [one_model(records)])
    for task, metrics in tasks(records).items():
        tables = [table(records, task, one) for one in metrics if not alone]
        blocks = (*tables, _by_length(records, looks, task, metrics[0]))
        yield Section(f"evaluation-{task}", f"Evaluation: {task}", blocks, caption)
        caption = ""


def verdict(records: Records, threshold: float = LEVEL) -> list[str]:
    """The numbers of the first two tasks in a sentence each."""
    said = (numbers(records, task, threshold) for task in tasks(records))
    return [one for one in said if one][:2]


def numbers(records: Records, task: str, threshold: float = LEVEL) -> str:
    """A sentence with each model's mean at the longest length, without scaling."""
    metric = tasks(records)[task][0]
    longest = max(records.dimension(metric, "length", task=task), default=None)
    where: dict[str, Any] = {"task": task} if longest is None else {"task": task, "length": longest}
    where["scaling"] = PLAIN if records.dimension(metric, "scaling", **where) else None
    words = metric.replace("_", " ") + ("" if task == metric else f" of {task}")
    at = f" at {longest:,} tokens" if longest else ""
    what = f"{words[:1].upper()}{words[1:]}{at}{_of_text(records, task)}"
    number = Quantity("", metric=metric, at=where, pooled=True)
    return narrative.answer(records, what, number, threshold=threshold)


def _of_text(records: Records, task: str) -> str:
    return narrative.text_in_words(records) if task in _READ else ""


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


def _by_length(records: Records, looks: Looks, task: str, metric: str) -> Panel | None:
    """A line a model and scaling of a task's first metric, over depths and settings, of one text.

    Of many models only what was measured without scaling: more lines could not be told apart.
    """
    texts = records.dimension(metric, "longest", task=task)
    of_text = {"longest": texts[-1]} if len(texts) > 1 else {}
    few = len(records.arms()) <= FEW
    variants: dict[str, dict[int, Quantity]] = {}
    for one in (one for run in records.runs for one in run.select(metric, task=task, **of_text)):
        line, length = scaling_name(one.dimensions), one.dimensions.get("length")
        if length is not None and (few or line == PLAIN):
            at = {name: one.dimensions.get(name) for name in _BY_LENGTH} | of_text
            number = Quantity("", metric=metric, at=at, pooled=True)
            variants.setdefault(line, {})[length] = number
    ordered = {line: dict(sorted(numbers.items())) for line, numbers in variants.items()}
    words = metric.replace("_", " ")
    title = f"{words[:1].upper()}{words[1:]} by length of text"
    note = "" if few else "Without scaling."
    return charts.by_length(records, looks, ordered, title, words, note)
