"""Evaluations on a page: a section a task, with tables and curves by length.

A number is the mean over seeds, and in tables and curves over depths; ± is one standard deviation
over seeds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from clearhead.records.frame import frame
from clearhead.records.runs import DIMENSIONS, Records
from clearhead.report import figures, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.narrative import Maker
from clearhead.report.page import Panel, Section
from clearhead.report.pivots import Entry, Heading, Pivot, build, by_seed
from clearhead.report.quantities import Quantity, arm_headings

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


def tasks(records: Records) -> dict[str, list[str]]:
    """The metrics of each task that any run has measured, in order."""
    metrics: dict[str, dict[str, None]] = {}
    for run in records.runs:
        for one in run.measures.values():
            task = one.dimensions.get("task")
            shown = one.metric != DOCUMENTS and not one.details.get("aside")
            if task is not None and (one.value is not None or one.not_finite) and shown:
                metrics.setdefault(str(task), {})[one.metric] = None
    return {task: list(names) for task, names in metrics.items()}


def table(records: Records, task: str, metric: str, *, by_depth: bool = False) -> Pivot | None:
    """A row a model, a column a setting and length; of one model a row a setting."""
    texts = len(records.dimension(metric, "longest", task=task)) > 1
    told = {"depth": by_depth, "longest": texts}
    named = [name for name in DIMENSIONS if told.get(name, True)]
    places: dict[tuple[str, int], Quantity] = {}
    for run in records.runs:
        for one in run.select(metric, task=task):
            words = setting(one.dimensions, by_depth=by_depth, longest=texts)
            at = {name: one.dimensions.get(name) for name in named}
            number = Quantity("", words, metric=metric, at=at, pooled=True)
            places.setdefault((words, one.dimensions.get("length", 0)), number)
    arms, reference = records.arms(), next(iter(records.arms()), "")

    def fill(arm: str, place: tuple[str, int]) -> tuple[Entry, ...]:
        return places[place].entries(records, arm, reference) if place in places else ()

    guesses: dict[str, list[float]] = {}
    for (words, _), number in places.items() if metric == "accuracy" else ():
        chance = replace(number, metric="chance")
        known = [one for arm in arms for one in by_seed(chance.found(records, arm))]
        guesses.setdefault(words, []).extend(known)
    notes = {words: f"chance {style.percent(fmean(x))}" for words, x in guesses.items() if x}
    settings = list(dict.fromkeys(words for words, _ in places))
    lengths = sorted({length for _, length in places})
    names = {length: f"{length:,}" if length else "" for length in lengths}
    by = " by length in tokens" if any(lengths) else ""
    words = metric.replace("_", " ")
    of = narrative.text_in_words(records) if task in _READ else ""
    title, corner = f"{task}, {words}{by}{of}", f"{words}{by}"
    across = [(Heading(title=name), length) for length, name in names.items()]
    if len(arms) == 1:
        down = [(Heading(title=one, note=notes.get(one, "")), one) for one in settings]
        return build(title, down, across, lambda *place: fill(reference, place), corner=corner)
    columns = [
        (replace(name, group=one, note=notes.get(one, "")), (one, length))
        for one in settings
        for name, length in across
    ]
    return build(title, arm_headings(records), columns, fill, corner=corner)


def tables(records: Records, name: str) -> Iterator[Pivot]:
    """All of one model's numbers in a table, depths apart, for `clearhead eval`."""
    rows: list[tuple[Heading, dict[str, tuple[Entry, ...]]]] = []
    for task, metrics in tasks(records).items():
        for metric in metrics:
            pivot = table(records, task, metric, by_depth=True)
            if pivot is None:
                continue
            for row, entries in zip(pivot.rows, pivot.cells, strict=True):
                lengths = [column.title for column in pivot.columns]
                group = task + (narrative.text_in_words(records) if task in _READ else "")
                title = f"{metric.replace('_', ' ')}, {row.title}"
                by_length = dict(zip(lengths, entries, strict=True))
                rows.append((replace(row, group=group, title=title), by_length))
    names = sorted({one for _, entries in rows for one in entries}, key=lambda one: (len(one), one))
    columns = [(Heading(title=one), one) for one in names]
    corner = "by length" if any(names) else ""
    pivot = build(name, rows, columns, lambda row, one: row.get(one, ()), corner=corner)
    yield from [] if pivot is None else [pivot]


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """A section for each task, over all sets of records."""
    caption = CAPTION.format(*(("", "") if records.given else SEEDS))
    for task, metrics in tasks(records).items():
        makers: list[Maker] = [partial(table, task=task, metric=one) for one in metrics]
        makers.append(partial(_by_length, looks=looks, task=task, metric=metrics[0]))
        blocks = tuple(narrative.each(records, *makers))
        title = f"Evaluation: {task}"
        yield Section(name=f"evaluation-{task}", title=title, caption=caption, blocks=blocks)
        caption = ""


def verdict(records: Records) -> str:
    """The numbers of the first two tasks in a sentence each."""
    said = (numbers(records, task) for task in tasks(records))
    return " ".join([one for one in said if one][:2])


def numbers(records: Records, task: str) -> str:
    """A sentence with each model's mean at the longest length, without scaling."""
    labelled = records.labelled(records.labels()[0])
    metric = next(iter(tasks(labelled).get(task, ())), "")
    longest = max(labelled.dimension(metric, "length", task=task), default=None)
    where: dict[str, Any] = {"task": task} if longest is None else {"task": task, "length": longest}
    where["scaling"] = PLAIN if labelled.dimension(metric, "scaling", **where) else None
    words = metric.replace("_", " ") + ("" if task == metric else f" of {task}")
    at = f" at {longest:,} tokens" if longest else ""
    text = narrative.text_in_words(labelled) if task in _READ else ""
    return narrative.answer(
        labelled,
        f"{words[:1].upper()}{words[1:]}{at}{text}",
        Quantity("", metric=metric, at=where, pooled=True),
    )


def setting(dimensions: Mapping[str, Any], *, by_depth: bool = False, longest: bool = False) -> str:
    """All dimensions of a cell in words but its length and, unless asked for, these two."""
    told = {"depth": by_depth, "longest": longest}
    words = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
        for name, value in dimensions.items()
        if told.get(name, name not in _SILENT) and (name, value) != ("order", "random")
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
    rows = frame({"": records}, metric)
    rows = rows[(rows["task"] == task) & rows["length"].notna()]
    if rows["longest"].nunique() > 1:
        rows = rows[rows["longest"] == rows["longest"].max()]
    rows = rows.assign(line=[scaling_name(one.dimensions) for one in rows["measure"]])
    few = len(records.arms()) <= FEW
    rows = rows if few else rows[rows["line"] == PLAIN]
    if rows["length"].nunique() < 2:
        return None
    curves = figures.curves(records, figures.finite(rows), "length", "line")
    words = metric.replace("_", " ")
    title = f"{words[:1].upper()}{words[1:]} by length of text"
    return figures.by_length(
        records, looks, curves, title, words, "" if few else "Without scaling."
    )
