"""Tables of numbers by model, over seeds: a cell is a `Quantity` of the records at a `Model`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, cast

from clearhead.errors import NOT_FINITE
from clearhead.records.intervals import Component, component
from clearhead.records.runs import COMPARISON, Measure, Records, Run
from clearhead.report import statistics, style
from clearhead.report.statistics import Difference, Summary, summarize

Found = dict[int, list[Measure]]  # by seed, those with a value
THIS = "this run"  # beside committed records, which have labels
SHARE = "first_token_argmax_share"


@dataclass(frozen=True)
class Heading:
    """A row's or a column's name; `arm` sets its colour."""

    title: str
    group: str = ""
    note: str = ""
    arm: str = ""


@dataclass(frozen=True)
class Entry:
    """One number of a cell, by `name` if there are several; `note` stands in for a verdict."""

    text: str
    name: str = ""
    detail: str = ""
    difference: Difference | None = None
    note: str = ""


Cell = tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """A table; `cells` are by row and column, and may be empty."""

    title: str
    corner: str
    rows: tuple[Heading, ...]
    columns: tuple[Heading, ...]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Model(Heading):
    """The runs of one arm among the `records` of its label, compared with the arm `reference`;
    seeds of models that are `given` are no sample."""

    records: Records
    reference: str
    given: bool


def models(records: Records) -> Iterator[Model]:
    """The arms of each label, with notes on all of an arm's numbers."""
    labels = records.labels()
    for label in labels:
        labelled = records.labelled(label)
        reference, *others = arms = labelled.arms()
        given = labelled.given or not any(
            # A model is diagnosed or quantised once, however it was trained.
            run.study == COMPARISON or len(labelled.of(run.arm)) > 1
            for run in labelled.runs
        )
        for arm in arms:
            runs = labelled.of(arm)
            lost = sum(run.diverged for run in runs)
            n = len(runs) - lost
            one_seed = "1 seed" if arm == reference else str(statistics.Verdict.ONE_SEED)
            notes = {
                "reference": arm == reference and bool(others),
                one_seed if n == 1 else f"{n} seeds": not given,
                f"{lost} of {len(runs)} runs diverged": lost,
                "rate at the edge": any(run.at_edge for run in runs),
                # A perplexity above the square root of the vocabulary.
                "hardly learnt": any(
                    (derived(run, "trained perplexity") or 0) ** 2 > (run.vocabulary or math.inf)
                    for run in runs
                ),
            }
            note = ", ".join(words for words, holds in notes.items() if holds)
            group = label or THIS * (len(labels) > 1)
            yield Model(arm, group, note, arm, records=labelled, reference=reference, given=given)


SIZES = ("parameters", "non_embedding_parameters")
DERIVED = (*SIZES, "trained perplexity", "outlier", "outlier_channels", "sink")


def derived(run: Run, metric: str) -> float | None:
    """A number of a run that is no single measure, one of `DERIVED`."""
    if metric == "trained perplexity":
        return run.value("perplexity", length=run.sequence_length)
    if metric == "sink":  # of the difference of maps if there is one
        values = (run.value(SHARE, map=name) for name in ("difference", "softmax"))
        return next((one for one in values if one is not None), None)
    if metric == "outlier":
        top, median = run.value("hidden_top_1"), run.value("hidden_median")
        return top / median if top is not None and median else None
    if metric == "outlier_channels":
        without = None if run.measure("hidden_top_1") is None else 0.0
        return next((float(line["of"]) for line in run.payload("channel")), without)
    return run.header.get(metric)


@dataclass(frozen=True)
class Quantity(Heading):
    """A number of every run, shown as value × scale: one of `DERIVED`, a measure at exactly these
    dimensions ("layer" may be "first" or "last"), or if `pooled` the mean over all others; of each
    map if `by_map`. A difference is shown if `judged`; `one_device` leaves out runs on others."""

    metric: str = ""
    at: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scale: float = 1.0
    write: Callable[[float], str] | None = None
    by_map: bool = False
    pooled: bool = False
    judged: bool = True
    one_device: bool = False

    def measures(self, run: Run, **place: str) -> list[Measure]:
        """Measures of a run, those without a value too; `place` adds dimensions."""
        at = {**self.at, **place}
        if self.pooled:
            return run.select(self.metric, **at)
        if self.metric in DERIVED:
            value = derived(run, self.metric)
            return [] if value is None else [Measure(metric=self.metric, value=float(value))]
        if at.get("layer") in ("first", "last"):
            layers = [one for one in run.select(self.metric) if "layer" in one.dimensions]
            layers.sort(key=lambda one: one.dimensions["layer"])
            return layers[:1] if at["layer"] == "first" else layers[-1:]
        one = run.measure(self.metric, **at)
        return [] if one is None else [one]

    def found(self, records: Records, arm: str, **place: str) -> Found:
        """The measures of an arm that have a value, by seed; none of a mean with a lost part."""
        measures = {run.seed: self.measures(run, **place) for run in records.of(arm)}
        if self.pooled and any(one.not_finite for ones in measures.values() for one in ones):
            return {}
        valued = {n: [one for one in measures[n] if one.value is not None] for n in measures}
        return {seed: ones for seed, ones in valued.items() if ones}

    def summary(self, model: Model) -> Summary | None:
        """Over the seeds of a model, as it is shown; None without a number."""
        return summarize(by_seed(self.found(model.records, model.arm), self.shown))

    def is_lost(self, model: Model) -> bool:
        """True if one of its measures is not finite."""
        runs = model.records.of(model.arm)
        return any(one.not_finite for run in runs for one in self.measures(run))

    @property
    def shown(self) -> float:
        """The factor from a value to the number shown."""
        return self.scale * (100 if self.write is style.percent else 1)

    def entries(self, model: Model) -> Cell:
        """The cell of a model; empty where nothing was recorded."""
        records = model.records.on_one_device() if self.one_device else model.records
        maps = records.dimension(self.metric, "map", model.arm) if self.by_map else [""]
        cell = []
        for name in maps:
            # Maps that plain attention lacks are held against its only one.
            own, plain = ({"map": one} if name else {} for one in (name, "softmax"))
            heading = "" if name == "softmax" else name
            if mine := self.found(records, model.arm, **own):
                theirs = Found()
                if self.judged and model.arm != model.reference:
                    theirs = self.found(records, model.reference, **own)
                    theirs = theirs or self.found(records, model.reference, **plain)
                cell.append(replace(entry(mine, theirs, self, model), name=heading))
            elif lost := [x for run in records.of(model.arm) for x in self.measures(run, **own)]:
                text = NOT_FINITE if any(one.not_finite for one in lost) else "none"
                reason = next((one.reason for one in lost if one.reason), "")
                note = reason.removeprefix(text).removeprefix(": ")
                cell.append(Entry(text, heading, note=note))
        return tuple(cell)


def entry(mine: Found, theirs: Found, quantity: Quantity, model: Model) -> Entry:
    """A number over seeds, and its difference to `theirs`, the reference's, if there are any."""
    given, scale = model.given, quantity.shown
    n, mean, deviation, interval = cast("Summary", summarize(by_seed(mine, scale)))
    text = style.with_spread(mean, deviation)
    if quantity.write is not None and not deviation:
        text = quantity.write(mean * quantity.scale / scale)
    elif quantity.write is style.percent:
        text += "\u00a0%"
    detail = "one model" if given else "one seed" if n == 1 else f"{n} seeds, all alike"
    if interval is not None:
        low, high = (style.number(bound, 4) for bound in interval)
        detail = f"{n} seeds, 95 % interval of the mean: {low} to {high}"
    elif n == 1 and len(measures := next(iter(mine.values()))) == 1:
        details = measures[0].details  # its own error: an interval, or one standard error
        if details.get("interval") is not None:
            ends = style.bounds(*(scale * bound for bound in details["interval"]))
            text += f" [{ends.replace(' to ', ', ')}]"
        elif details.get("stderr") is not None:
            text += f" ± {style.number(scale * details['stderr'], 2)}"
    difference = difference_of(mine, theirs, scale, given=given)
    if difference and difference.interval and difference.p is not None:
        low, high = (style.number(bound, 3) for bound in difference.interval)
        p = style.number(difference.p, 2)
        detail += f"; difference to {model.reference}, 95 % interval: {low} to {high}, p = {p}"
    return Entry(text, detail=detail, difference=difference)


def difference_of(
    mine: Found, theirs: Found, scale: float = 1.0, **options: Any
) -> Difference | None:
    """The difference of two arms over their seeds and drawn items; `options` are of `compare`."""
    compared = frozenset(
        frozenset((seed, one.key, one.value) for seed, ones in side.items() for one in ones)
        for side in (mine, theirs)
    )
    values, others = by_seed(mine, scale), by_seed(theirs, scale)
    items = partial(_item_error, mine, theirs, scale)
    return statistics.compare(values, others, items, compared=compared, **options)


def by_seed(measures: Found, scale: float = 1.0) -> list[float]:
    """One number a seed, the mean of its measures, times `scale`."""
    return [
        scale * fmean(one.value for one in ones if one.value is not None)
        for ones in measures.values()
    ]


def _item_error(mine: Found, theirs: Found, scale: float, ratio: float) -> tuple[Component, ...]:
    """The error of drawing these keys or documents and no others; empty where records lack them.
    Items are drawn a cell at a time, so variances are added; what both find hard is no error."""
    strata, trials = list[Component](), True
    arms = [[one for ones in side.values() for one in ones] for side in (mine, theirs)]
    for key in {one.key for one in arms[0]}:
        sides = [[one.details.get("items", ()) for one in arm if one.key == key] for arm in arms]
        sizes = {len(items) for side in sides for items in side}
        if not all(sides) or len(sizes) > 1 or min(sizes) < 2:
            return ()
        trials = trials and all(x in (0, 1) for side in sides for items in side for x in items)
        ours, others = ([fmean(one) for one in zip(*side, strict=True)] for side in sides)
        strata.append(component([a - ratio * b for a, b in zip(ours, others, strict=True)]))
    variances, degrees = zip(*strata, strict=True)
    error = Component(sum(variances) / len(strata) ** 2, sum(degrees))
    if trials and not error.variance:
        error = statistics.alike_trials(int(error.degrees) + len(strata))
    return (error.scaled(scale),)


def pivot(
    title: str,
    rows: Iterable[Heading],
    columns: Iterable[Heading],
    cell: Callable[[Any, Any], Cell],
    corner: str = "",
) -> Pivot | None:
    """A table of cells, without the rows and columns that are empty; None where all are."""
    columns = [*columns]
    cells = {row: [cell(row, column) for column in columns] for row in rows}
    cells = {row: ones for row, ones in cells.items() if any(ones)}
    numbered = [n for n in range(len(columns)) if any(ones[n] for ones in cells.values())]
    if not numbered:
        return None
    return Pivot(
        title=title,
        corner=corner,
        rows=(*cells,),
        columns=tuple(columns[n] for n in numbered),
        cells=tuple(tuple(ones[n] for n in numbered) for ones in cells.values()),
    )


def by_arm(
    records: Records, title: str, quantities: Iterable[Quantity], corner: str = "model"
) -> Pivot | None:
    """A table of quantities, a row a model."""
    return pivot(title, models(records), quantities, lambda a, b: b.entries(a), corner)
