"""Evaluations on a page: a section a task, with tables, heat-maps of depth and loss by position.

A number is the mean over seeds, and in tables and curves over depths; ± is one standard deviation
over seeds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from clearhead.errors import NOT_FINITE
from clearhead.records.runs import Measure, Records, Run
from clearhead.report import figures, narrative, style
from clearhead.report.charts import Curves, Looks, heat_map
from clearhead.report.page import Block, Panel, Scale, Section
from clearhead.report.pivots import Entry, Found, Heading, Pivot, build, by_seed, entry
from clearhead.report.statistics import summarize

if TYPE_CHECKING:
    import pandas

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
_SILENT = ("task", "scaling", "factor", "length", "longest", "digest", "depth")
_LOWER = ("perplexity", "loss", "bytes")  # parts of a metric's name
_HIGHER = (
    *("accuracy", "accuracy_norm", "masked_accuracy", "forced_tokens", "answer_contained"),
    *("acc", "acc_norm", "f1", "token_f1", "exact_match"),
)
_PLACE = ["arm", "setting", "length"]
Places = dict[tuple[str, str, int], Found]  # empty where a number is missing or not finite


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


def cells(
    records: Records, task: str, metric: str, *, by_depth: bool = False
) -> "pandas.DataFrame":
    """A row a measure of a task's metric: arm, setting, length, seed and the measure."""
    import pandas

    texts = len(records.dimension(metric, "longest", task=task)) > 1
    rows = [
        (arm, setting(at, by_depth=by_depth, longest=texts), at.get("length", 0), run.seed, one)
        for arm in records.arms()
        for run in records.of(arm)
        for one in run.select(metric, task=task)
        if (at := one.dimensions)
    ]
    return pandas.DataFrame(rows, columns=[*_PLACE, "seed", "measure"])


def _found(rows: "pandas.DataFrame") -> Found:
    """The measures that have a value by seed; none where one is not finite."""
    ones: dict[int, list[Measure]] = {}
    for seed, one in zip(rows["seed"], rows["measure"], strict=True):
        if one.not_finite:
            return {}
        if one.value is not None:
            ones.setdefault(seed, []).append(one)
    return ones


def _places(rows: "pandas.DataFrame", by: list[str]) -> Any:
    return {place: _found(some) for place, some in rows.groupby(by, sort=False)}


def table(records: Records, task: str, metric: str, *, by_depth: bool = False) -> Pivot | None:
    """A row a model, a column a setting and length; of one model a row a setting."""
    rows = cells(records, task, metric, by_depth=by_depth)
    lost = {tuple(place) for *place, one in rows[[*_PLACE, "measure"]].values if one.not_finite}
    places: Places = _places(rows, _PLACE)
    bests = _bests(places, metric)
    arms, reference = records.arms(), next(iter(records.arms()), "")

    def fill(arm: str, words: str, length: int) -> tuple[Entry, ...]:
        mine = places.get((arm, words, length))
        if not mine:
            text = NOT_FINITE if (arm, words, length) in lost else "none"
            return () if mine is None else (Entry(text=text),)
        theirs = {} if arm == reference else places.get((reference, words, length), {})
        shown = entry(mine, theirs, reference=reference, given=records.given)
        return (replace(shown, best=_mean(mine) == bests.get((words, length))),)

    chances = (
        cells(records, task, "chance", by_depth=by_depth) if metric == "accuracy" else rows[:0]
    )
    guesses = {
        words: f"chance {style.percent(fmean(map(_mean, known)))}"
        for words, some in chances.groupby("setting", sort=False)
        if (known := [*filter(None, _places(some, _PLACE).values())])
    }
    settings = list(dict.fromkeys(rows["setting"]))
    lengths = sorted({*rows["length"]})
    names = {length: f"{length:,}" if length else "" for length in lengths}
    by = " by length in tokens" if any(lengths) else ""
    words = metric.replace("_", " ")
    of = narrative.text_in_words(records) if task in _READ else ""
    title, corner = f"{task}, {words}{by}{of}", f"{words}{by}"
    across = [(Heading(title=name), length) for length, name in names.items()]
    if len(arms) == 1:
        down = [(Heading(title=one, note=guesses.get(one, "")), one) for one in settings]
        return build(title, down, across, lambda *place: fill(reference, *place), corner=corner)
    columns = [
        (replace(name, group=one, note=guesses.get(one, "")), (one, length))
        for one in settings
        for name, length in across
    ]
    models = [(Heading(title=arm, arm=arm), arm) for arm in arms]
    return build(title, models, columns, lambda arm, place: fill(arm, *place), corner=corner)


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
    for task in tasks(records):
        blocks: list[Block | None] = []
        for tag, labelled in narrative.sets(records):
            if metrics := tasks(labelled).get(task):
                blocks += [tag, *(table(labelled, task, metric) for metric in metrics)]
                blocks += _heat_maps(labelled, task, metrics[0])
                blocks.append(_by_length(labelled, looks, task, metrics[0]))
                blocks.append(figures.loss_by_position(labelled, looks, task, scaling=PLAIN))
        yield Section(
            name=f"evaluation-{task}",
            title=f"Evaluation: {task}",
            answer="",
            caption=caption,
            blocks=tuple(block for block in blocks if block is not None),
        )
        caption = ""


def _bests(places: Places, metric: str) -> dict[tuple[str, int], float]:
    """The best mean by setting and length, where models differ."""
    best, means = _best_of(metric), dict[tuple[str, int], list[float]]()
    for (_, words, length), mine in places.items():
        means.setdefault((words, length), []).extend([_mean(mine)] if mine else [])
    several = {place: ones for place, ones in means.items() if len(set(ones)) > 1}
    return {} if best is None else {place: best(ones) for place, ones in several.items()}


def _best_of(metric: str) -> Callable[[Iterable[float]], float] | None:
    """The better end of a metric; None where it has none."""
    if any(word in metric for word in _LOWER):
        return min
    return max if metric in _HIGHER else None


def verdict(records: Records) -> str:
    """The numbers of the first two tasks in a sentence each."""
    said = (numbers(records, task) for task in tasks(records))
    return " ".join([one for one in said if one][:2])


def numbers(records: Records, task: str) -> str:
    """A sentence with each model's mean at the longest length, without scaling."""
    labelled = records.labelled(records.labels()[0])
    metric = next(iter(tasks(labelled).get(task, ())), "")
    longest = max(labelled.dimension(metric, "length", task=task), default=None)
    where = {"task": task} if longest is None else {"task": task, "length": longest}

    def read(run: Run) -> list[Measure]:
        ones = run.select(metric, **where)
        return [one for one in ones if one.dimensions.get("scaling", PLAIN) == PLAIN]

    words = metric.replace("_", " ") + ("" if task == metric else f" of {task}")
    at = f" at {longest:,} tokens" if longest else ""
    text = narrative.text_in_words(labelled) if task in _READ else ""
    return narrative.answer(labelled, f"{words[:1].upper()}{words[1:]}{at}{text}", read)


def setting(dimensions: Mapping[str, Any], *, by_depth: bool = False, longest: bool = False) -> str:
    """All dimensions of a cell in words but its length and, unless asked for, these two."""
    told = {"depth": by_depth, "longest": longest}
    words = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
        for name, value in dimensions.items()
        if told.get(name, name not in _SILENT)
    ]
    return ", ".join([scaling_name(dimensions), *words])


def scaling_name(dimensions: Mapping[str, Any]) -> str:
    """A rope scaling in words: "none", "yarn × 4"."""
    factor = dimensions.get("factor")
    return str(dimensions.get("scaling", PLAIN)) + (f" × {factor:g}" if factor is not None else "")


def _heat_maps(records: Records, task: str, metric: str) -> Iterator[Block]:
    """A panel a row: depth down, length across; only for what was measured at several depths."""
    rows = cells(records, task, metric)
    rows["depth"] = [one.dimensions.get("depth") for one in rows["measure"]]
    rows = rows.dropna(subset="depth")
    maps = {
        place: _places(some, ["depth", "length"])
        for place, some in rows.groupby(_PLACE[:2], sort=False)
    }
    maps = {place: one for place, one in maps.items() if len({depth for depth, _ in one}) > 1}
    means = {
        place: {at: _mean(by_seed) for at, by_seed in one.items() if by_seed}
        for place, one in maps.items()
    }
    largest = max([1.0, *(value for one in means.values() for value in one.values())])
    panels = []
    for (arm, words), values in means.items():
        figure = heat_map(
            values,
            largest,
            titles=("length in tokens", "depth"),
            form=".2f",
            hover="%{y} deep in %{x} tokens: %{z:.3f}%{customdata}",
            names=("{:,}".format, lambda depth: f"{100 * depth:g} %"),
            details={at: _interval(by_seed) for at, by_seed in maps[arm, words].items()},
        )
        figure.update_xaxes(type="category")
        figure.update_yaxes(type="category", title_standoff=10)
        name = f"{arm} · {words}"
        described = f"{metric} of {name} by depth and length"
        panels.append(Panel(title=name, figure=figure, shape="cells", described=described))
    if panels:
        ticks = tuple(f"{largest * part:.2f}" for part in (0, 0.5, 1))
        yield Scale(name=f"{metric} by depth and length", ticks=ticks)
        yield from panels


def _mean(measures: Found) -> float:
    return fmean(by_seed(measures))


def _interval(measures: Found) -> str:
    """A cell's 95 % interval, of one seed; several have a spread instead."""
    ones = [one for some in measures.values() for one in some]
    if len(ones) != 1 or (interval := ones[0].details.get("interval")) is None:
        return ""
    return f", 95 % interval {interval[0]:.2f} to {interval[1]:.2f}"


def _by_length(records: Records, looks: Looks, task: str, metric: str) -> Panel | None:
    """A line a model and scaling of a task's first metric, over depths and settings, of one text.

    Of many models only what was measured without scaling: more lines could not be told apart.
    """
    few, texts = len(records.arms()) <= FEW, records.dimension(metric, "longest", task=task)
    rows = cells(records, task, metric)
    rows["name"] = rows["setting"].str.partition(",")[0]
    if len(texts) > 1:
        rows = rows[rows["setting"].str.contains(f"longest {texts[-1]:g}", regex=False)]
    rows = rows if few else rows[rows["name"] == PLAIN]
    curves: Curves = {}
    for (arm, name, length), measures in _places(rows, ["arm", "name", "length"]).items():
        if over := summarize(by_seed(measures)):
            curves.setdefault((arm, name), []).append((length, over.mean, over.deviation))
    if rows["length"].nunique() < 2:
        return None
    words = metric.replace("_", " ")
    title = f"{words[:1].upper()}{words[1:]} by length of text"
    curves = {place: sorted(points) for place, points in curves.items()}
    return figures.by_length(
        records, looks, curves, title, words, "" if few else "Without scaling."
    )
