"""Evaluations on a page: a section a task, with tables, heat-maps of depth and loss by position.

A number is the mean over seeds, and in tables and curves over depths; ± is one standard deviation
over seeds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from clearhead.errors import NOT_FINITE
from clearhead.records.runs import Measure, Records
from clearhead.report import figures, narrative, style
from clearhead.report.charts import Looks, heat_map
from clearhead.report.page import Block, Fold, Panel, Panels, Scale, Section
from clearhead.report.pivots import Entry, Found, Heading, Pivot, build, entry
from clearhead.report.pivots import found as of_arm
from clearhead.report.statistics import summarize

PLAIN = "none"  # the scaling that a curve shows
FEW = 3  # models whose scalings a chart by length shows too
DOCUMENTS = "document_perplexity"
CAPTION = (
    "Above the lengths stand the scaling of the rotary frequencies and the setting; numbers are "
    "means over depths{}, the best model’s in bold. Under a number stands its difference to the "
    "first model’s{}; the error of drawing keys or documents is in its interval where records have "
    "them singly."
)
SEEDS = (" and seeds", ", by Welch’s t over seeds")
_READ = ("perplexity", "hits", "masked")  # tasks whose number is one of the text
# Dimensions that name no row: the column, and what only decides which text is read.
_SILENT = ("task", "scaling", "factor", "length", "longest", "digest")
_LOWER = ("perplexity", "loss", "bytes")  # parts of a metric's name
_HIGHER = (
    *("accuracy", "accuracy_norm", "masked_accuracy", "forced_tokens", "answer_contained"),
    *("acc", "acc_norm", "f1", "token_f1", "exact_match"),
)


@dataclass(frozen=True)
class Row:
    """A model, and all dimensions of its cells but length and, unless apart, depth."""

    arm: str
    setting: str

    @property
    def name(self) -> str:
        """The arm and its setting."""
        return f"{self.arm} · {self.setting}"


Places = set[tuple[Row, int]]  # rows and lengths
Grid = dict[Row, dict[int, dict[int, list[Measure]]]]  # by row, length and seed


def tasks(records: Records) -> dict[str, list[str]]:
    """The metrics of each task that any run has measured, in order."""
    found: dict[str, dict[str, None]] = {}
    for run in records.runs:
        for one in run.measures.values():
            task = one.dimensions.get("task")
            shown = one.metric != DOCUMENTS and not one.details.get("aside")
            if task is not None and (one.value is not None or one.not_finite) and shown:
                found.setdefault(str(task), {})[one.metric] = None
    return {task: list(metrics) for task, metrics in found.items()}


def grid(
    records: Records, task: str, metric: str, *, by_depth: bool = False, lost: Places | None = None
) -> Grid:
    """The measures of a task's metric that have a value; a place has none where all lack one, or
    where one is not finite: `lost` is given those places."""
    found: Grid = {}
    lost = set() if lost is None else lost
    texts = len(records.dimension(metric, "longest", task=task))
    for arm in records.arms():
        for run in records.of(arm):
            for one in run.select(metric, task=task):
                words = setting(one.dimensions, by_depth=by_depth, longest=texts > 1)
                row, length = Row(arm=arm, setting=words), one.dimensions.get("length", 0)
                by_seed = found.setdefault(row, {}).setdefault(length, {})
                if one.value is not None:
                    by_seed.setdefault(run.seed, []).append(one)
                elif one.not_finite:
                    lost.add((row, length))
    for row, length in lost:
        found[row][length] = {}
    return found


def table(records: Records, task: str, metric: str, *, by_depth: bool = False) -> Pivot | None:
    """A row a model, a column a setting and length; of one model a row a setting."""
    lost: Places = set()
    cells = grid(records, task, metric, by_depth=by_depth, lost=lost)
    reference = next(iter(records.arms()), "")
    bests = _bests(cells, metric)

    def fill(row: Row, length: int) -> tuple[Entry, ...]:
        mine = cells[row].get(length) if row in cells else None
        if not mine:
            text = NOT_FINITE if (row, length) in lost else "none"
            return () if mine is None else (Entry(text=text),)
        theirs: Found = {}
        if row.arm != reference:
            theirs = cells.get(Row(arm=reference, setting=row.setting), {}).get(length, {})
        shown = entry(mine, theirs, reference=reference, given=records.given)
        return (replace(shown, best=_mean(mine) == bests.get((row.setting, length))),)

    chances = grid(records, task, "chance", by_depth=by_depth) if metric == "accuracy" else {}
    guess = {row.setting: _chance(by_length) for row, by_length in chances.items()}
    lengths = sorted({length for by_length in cells.values() for length in by_length})
    settings = list(dict.fromkeys(row.setting for row in cells))
    names = {length: f"{length:,}" if length else "" for length in lengths}
    by = " by length in tokens" if any(lengths) else ""
    words = metric.replace("_", " ")
    of = narrative.text_in_words(records) if task in _READ else ""
    title, corner = f"{task}, {words}{by}{of}", f"{words}{by}"
    if len(records.arms()) == 1:
        rows = [(Heading(title=one, note=guess.get(one, "")), one) for one in settings]
        columns = [(Heading(title=name), length) for length, name in names.items()]
        return build(
            title,
            rows,
            columns,
            lambda one, length: fill(Row(reference, one), length),
            corner=corner,
        )
    return build(
        title,
        [(Heading(title=arm, arm=arm), arm) for arm in records.arms()],
        [
            (Heading(group=one, title=name, note=guess.get(one, "")), (one, length))
            for one in settings
            for length, name in names.items()
        ],
        lambda arm, place: fill(Row(arm, place[0]), place[1]),
        corner=corner,
    )


def tables(records: Records, name: str) -> Iterator[Pivot]:
    """All of one model's numbers in a table, depths apart, for `clearhead eval`."""
    rows: list[tuple[Heading, dict[str, tuple[Entry, ...]]]] = []
    for task, metrics in tasks(records).items():
        for metric in metrics:
            pivot = table(records, task, metric, by_depth=True)
            if pivot is None:
                continue
            lengths = [column.title for column in pivot.columns]
            group = task + (narrative.text_in_words(records) if task in _READ else "")
            for row, cells in zip(pivot.rows, pivot.cells, strict=True):
                title = f"{metric.replace('_', ' ')}, {row.title}"
                by_length = dict(zip(lengths, cells, strict=True))
                rows.append((replace(row, group=group, title=title), by_length))
    names = sorted({one for _, cells in rows for one in cells}, key=lambda one: (len(one), one))
    columns = [(Heading(title=one), one) for one in names]
    corner = "by length" if any(names) else ""
    pivot = build(name, rows, columns, lambda cells, one: cells.get(one, ()), corner=corner)
    if pivot is not None:
        yield pivot


def sections(records: Records, looks: Looks, *, lead: bool) -> Iterator[Section]:
    """A section for each task, over all sets of records.

    Args:
        lead: the page's verdict is `verdict`, which the sections do not repeat.
    """
    caption = CAPTION.format(*(("", "") if records.given else SEEDS))
    said = _leading(records) if lead else []
    for task in tasks(records):
        blocks: list[Block] = []
        for tag, labelled in narrative.sets(records):
            metrics = tasks(labelled).get(task)
            if metrics is None:
                continue
            blocks.append(tag)
            pivots = (table(labelled, task, metric) for metric in metrics)
            blocks += [pivot for pivot in pivots if pivot is not None]
            blocks += _heat_maps(labelled, task, metrics[0])
            curves = (
                _by_length(labelled, looks, task, metrics[0]),
                figures.loss_by_position(labelled, looks, task, scaling=PLAIN),
            )
            panels = tuple(curve for curve in curves if curve is not None)
            blocks += [Panels(panels=panels)] if panels else []
            blocks += _by_document(labelled, task)
        yield Section(
            name=f"evaluation-{task}",
            title=f"Evaluation: {task}",
            answer="" if task in said else best(records, task),
            caption=caption,
            blocks=tuple(blocks),
        )
        caption = ""


def _bests(cells: Grid, metric: str) -> dict[tuple[str, int], float]:
    """The best mean by setting and length, where models differ."""
    best = _best_of(metric)
    means: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row, by_length in cells.items():
        for length, by_seed in by_length.items():
            means[row.setting, length] += [_mean(by_seed)] if by_seed else []
    several = {place: found for place, found in means.items() if len(set(found)) > 1}
    return {} if best is None else {place: best(found) for place, found in several.items()}


def _best_of(metric: str) -> Callable[[Iterable[float]], float] | None:
    """The better end of a metric; None where it has none."""
    if any(word in metric for word in _LOWER):
        return min
    return max if metric in _HIGHER else None


def verdict(records: Records) -> str:
    """The best models by length of the first two tasks that have one."""
    return " ".join(best(records, task) for task in _leading(records))


def _leading(records: Records) -> list[str]:
    return [task for task in tasks(records) if best(records, task)][:2]


def best(records: Records, task: str) -> str:
    """A sentence that says which model and setting has the best mean at which lengths."""
    labelled = records.labelled(records.labels()[0])
    metric = next(iter(tasks(labelled).get(task, ())), "")
    extreme = _best_of(metric)
    if extreme is None:
        return ""
    spans: list[tuple[str, list[int], list[float]]] = []  # who, at which lengths, with what
    cells = grid(labelled, task, metric)
    for length in sorted({length for by_length in cells.values() for length in by_length}):
        here = {row: _mean(by[length]) for row, by in cells.items() if by.get(length)}
        if not here:
            continue
        value = extreme(here.values())
        winners = [row for row, mean in here.items() if mean == value]
        name = winners[0].name.removesuffix(f" · {PLAIN}")
        if len(winners) > 1:
            name = f"{narrative.in_words(len(winners))} rows alike"
        if not spans or spans[-1][0] != name:
            spans.append((name, [], []))
        spans[-1][1].append(length)
        spans[-1][2].append(value)
    words = [
        f"{name}{_at(lengths)} ({' to '.join(dict.fromkeys(map(style.number, (v[0], v[-1]))))})"
        for name, lengths, v in spans
    ]
    of = "" if task == metric else f" of {task}"
    said = narrative.enumerate_words(words) if words else "none"
    said += narrative.text_in_words(labelled) if task in _READ else ""
    return (
        f"{'Lowest' if extreme is min else 'Highest'} mean {metric.replace('_', ' ')}{of}: {said}."
    )


def _chance(by_length: Mapping[int, dict[int, list[Measure]]]) -> str:
    """The accuracy of a guess, where it was recorded; the same for every model."""
    known = [_mean(by_seed) for by_seed in by_length.values() if by_seed]
    return f"chance {style.percent(fmean(known))}" if known else ""


def _at(lengths: list[int]) -> str:
    if len(lengths) > 1:
        return f" from {lengths[0]:,} to {lengths[-1]:,} tokens"
    return f" at {lengths[0]:,} tokens" if any(lengths) else ""


def setting(dimensions: Mapping[str, Any], *, by_depth: bool = False, longest: bool = False) -> str:
    """All dimensions of a cell in words but its length and, unless asked for, these two."""
    told = {"depth": by_depth, "longest": longest}
    silent = {*_SILENT, "depth"} - {name for name, one in told.items() if one}
    words = [
        f"{name} {value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"{name} {value}"
        for name, value in dimensions.items()
        if name not in silent
    ]
    return ", ".join([scaling_name(dimensions), *words])


def scaling_name(dimensions: Mapping[str, Any]) -> str:
    """A rope scaling in words: "none", "yarn × 4"."""
    factor = dimensions.get("factor")
    return str(dimensions.get("scaling", PLAIN)) + (f" × {factor:g}" if factor is not None else "")


def _heat_maps(records: Records, task: str, metric: str) -> Iterator[Block]:
    """A panel a row: depth down, length across; only for what was measured at several depths."""
    panels = []
    largest = 1.0
    for row, by_length in grid(records, task, metric).items():
        cells: dict[tuple[int, float], dict[int, list[Measure]]] = {}
        for length, by_seed in by_length.items():
            for seed, ones in by_seed.items():
                for one in ones:
                    depth = one.dimensions.get("depth")
                    if depth is not None:
                        place = cells.setdefault((length, depth), {})
                        place.setdefault(seed, []).append(one)
        depths = sorted({depth for _, depth in cells})
        if len(depths) < 2:
            continue
        lengths = sorted(by_length)
        values = {place: _mean(by_seed) for place, by_seed in cells.items()}
        largest = max(largest, *values.values())
        figure = heat_map(
            [f"{length:,}" for length in lengths],
            [f"{100 * depth:g} %" for depth in depths],
            [[values.get((length, depth)) for length in lengths] for depth in depths],
            largest,
            titles=("length in tokens", "depth"),
            form=".2f",
            hover="%{y} deep in %{x} tokens: %{z:.3f}%{customdata}",
            custom=[[_interval(cells.get((n, depth), {})) for n in lengths] for depth in depths],
        )
        figure.update_xaxes(type="category")
        figure.update_yaxes(type="category", title_standoff=10)
        described = f"{metric} of {row.name} by depth and length"
        panels.append(Panel(title=row.name, figure=figure, described=described))
    if panels:
        for panel in panels:  # one scale for all
            panel.figure.data[0].zmax = largest
        ticks = tuple(f"{largest * part:.2f}" for part in (0, 0.5, 1))
        yield Scale(name=f"{metric} by depth and length", ticks=ticks)
        yield Panels(panels=tuple(panels), shape="cells")


def _mean(by_seed: Mapping[int, list[Measure]]) -> float:
    return fmean(fmean(one.value or 0.0 for one in ones) for ones in by_seed.values())


def _interval(by_seed: Mapping[int, list[Measure]]) -> str:
    """A cell's 95 % interval, of one seed; several have a spread instead."""
    ones = [one for found in by_seed.values() for one in found]
    if len(ones) != 1 or (interval := ones[0].details.get("interval")) is None:
        return ""
    return f", 95 % interval {interval[0]:.2f} to {interval[1]:.2f}"


def _by_length(records: Records, looks: Looks, task: str, metric: str) -> Panel | None:
    """A line a model and scaling of a task's first metric, over depths and settings, of one text.

    Of many models only what was measured without scaling: more lines could not be told apart.
    """
    few, texts = len(records.arms()) <= FEW, records.dimension(metric, "longest", task=task)
    found: dict[tuple[str, str], dict[int, dict[int, list[Measure]]]] = {}
    for row, by_length in grid(records, task, metric).items():
        name = row.setting.partition(",")[0]
        other = len(texts) > 1 and f"longest {texts[-1]:g}" not in row.setting
        if other or (not few and name != PLAIN):
            continue
        mine = found.setdefault((row.arm, name), {})
        for length, by_seed in by_length.items():
            for seed, ones in by_seed.items():
                mine.setdefault(length, {}).setdefault(seed, []).extend(ones)
    if len({length for by_length in found.values() for length in by_length}) < 2:
        return None
    curves: figures.Curves = {}
    for place, by_length in found.items():
        for length, by_seed in sorted(by_length.items()):
            if over := summarize([_mean({seed: ones}) for seed, ones in by_seed.items()]):
                curves.setdefault(place, []).append((length, over.mean, over.deviation))
    words = metric.replace("_", " ")
    title = f"{words[:1].upper()}{words[1:]} by length of text"
    note = "" if few else "Without scaling."
    return figures.by_length(records, looks, curves, title, words, note)


def _by_document(records: Records, task: str) -> Iterator[Block]:
    """Each model's perplexity of each text, by length, without scaling; folded away."""
    plain = {"task": task, "scaling": PLAIN}
    for arm in records.arms():
        documents = dict.fromkeys(
            one.dimensions["document"]
            for run in records.of(arm)
            for one in run.select(DOCUMENTS, **plain)
        )
        lengths = records.dimension(DOCUMENTS, "length", arm, **plain)

        def fill(document: str, length: int, arm: str = arm) -> tuple[Entry, ...]:
            here = {**plain, "document": document, "length": length}
            values = of_arm(records, arm, lambda mine: mine.select(DOCUMENTS, **here))
            return (entry(values, {}, reference="", given=records.given),) if values else ()

        pivot = build(
            f"perplexity of {arm} by document",
            [(Heading(title=document), document) for document in documents],
            [(Heading(title=f"{length:,}"), length) for length in lengths],
            fill,
            corner="perplexity by length in tokens",
        )
        if pivot is not None:
            yield Fold(summary=f"Perplexity of {arm} by document, without scaling", pivot=pivot)
