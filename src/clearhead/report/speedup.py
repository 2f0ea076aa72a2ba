"""Effective speed-up: what the baseline pays to reach an arm's loss, over what the arm paid.

At each size the last loss on the way is looked up on the baseline's own curve. A rate that decays
makes that a bound: a baseline that was trained for less, down to its lowest rate, would have been
there sooner. Over three sizes or more power laws of the final losses (`power_laws`) answer for any
cost, also beyond those that were paid.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.charts import where_reached
from clearhead.report.milestones import steps_of
from clearhead.report.page import Notes, Section, section
from clearhead.report.pivots import Entry, Heading, build
from clearhead.report.power_laws import PowerLaws, fit
from clearhead.report.statistics import Difference, Verdict, compare

SIZES = 3  # with fewer no power law is fitted
# Settings that the sizes of a ladder share; its text and its objective are the others.
RECIPE = ("sequence_length", "optimizer", "schedule")
LEAST, MOST = 0.01, 100  # ratios told apart
PROJECTED = 10  # times the largest cost
PROJECTION = f"projected to {PROJECTED} × the largest cost"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A cost of training, read from a run's steps.

    Attributes:
        counter: the field of a step that the rate is of.
    """

    title: str
    rate: Callable[[Run], float | None]
    counter: str
    one_device: bool = False

    def comparable(self, records: Records) -> Records:
        """The runs whose costs compare."""
        return records.on_one_device() if self.one_device else records

    def at(self, run: Run) -> dict[int, float]:
        """{step: cost up to it}; empty for a run that diverged, whose cost bought nothing."""
        rate = self.rate(run)
        if rate is None or run.diverged:
            return {}
        counted = ((int(step["step"]), step.get(self.counter)) for step in run.steps)
        return {step: rate * count for step, count in counted if count is not None}

    def curve(self, run: Run) -> list[tuple[float, float]]:
        """(validation loss on the way, cost), in the order of steps."""
        costs = self.at(run)
        return [(loss, costs[step]) for step, loss in steps_of(run, "loss", {}) if step in costs]

    def whole(self, run: Run) -> float | None:
        """The cost of the whole run."""
        costs = self.at(run)
        return costs[max(costs)] if costs else None


def _training_flops(run: Run) -> float | None:
    """Of a token: the forward pass, and twice that for the backward pass."""
    forward = run.header.get("forward_flops")
    return None if forward is None else 3.0 * forward


COSTS = (
    Cost(title="FLOPs", rate=_training_flops, counter="tokens"),
    Cost(title="wall-clock", rate=lambda run: 1.0, counter="seconds", one_device=True),
)
Cells = dict[tuple[str, str], Entry]  # by cost and column
IN_RUN, FITTED = "in the run", "by the fit"
READING = {
    IN_RUN: "In the run: the arm’s last loss on the way is looked up on the baseline’s curve at "
    "that size, for all pairs of seeds. “≥”: the baseline never came down to it, and paid all that "
    "it had. “≤”: it was below it at its first measurement. A number below 1 is itself an upper "
    "bound: learning rates decay to the end, and a baseline trained for less would have been there "
    "sooner.",
    FITTED: "By the fit: from L = E + A·C^−α, a law of final loss L by cost C, fitted to all "
    "sizes; E, the loss that no training removes, is the same for both. “Extrapolated”: the "
    "baseline would pay more than it ever did.",
}
POOR_FROM = 0.01  # of a size's mean loss off its law
POOR = "poor fit"
WARNING = (
    "too far for its numbers to be used (too few tokens, rates that do not suit every size, or "
    "seeds or clocks that differ too much)"
)


def speedup_section(records: Records) -> Section | None:
    """A row for each arm at each size, and at ten times the largest cost; None without curves."""
    laws = _laws(records)
    columns = [
        (Heading(group=f"Speed-up in {cost.title}", title=title), (cost.title, title))
        for cost in COSTS
        for title in (IN_RUN, FITTED)
    ]
    table = build(
        "effective speed-up",
        _rows(records, laws),
        columns,
        lambda cells, column: (cells[column],) if column in cells else (),
        corner="size",
    )
    if table is None:
        return None
    reading = dict.fromkeys(READING[column.title] for column in table.columns)
    fits = dict.fromkeys(one.in_words for one in laws.values())
    notes = Notes(texts=(*reading, *fits))
    return section("comparison.speed-up", "", [table, notes])


def _rows(records: Records, laws: "Laws") -> Iterator[tuple[Heading, Cells]]:
    found: dict[str, list[tuple[Heading, Cells]]] = {}
    projected: dict[str, Cells] = {}
    for label in records.labels():
        labelled = records.labelled(label)
        reference, *arms = labelled.arms()
        for arm in arms:
            group = f"{arm} over {reference}"
            cells: Cells = {}
            for cost in COSTS:
                alike = cost.comparable(labelled)
                one = _in_run(cost, alike.of(arm), alike.of(reference))
                if one is not None:
                    cells[cost.title, IN_RUN] = one
                law = laws.get((label, group, cost.title))
                paid = [whole for run in alike.of(arm) if (whole := cost.whole(run)) is not None]
                if law is not None and paid:
                    cells[cost.title, FITTED] = law.entry(fmean(paid))
                    far = law.entry(PROJECTED * law.largest)
                    projected.setdefault(group, {})[cost.title, FITTED] = far
            heading = Heading(title=f"at {label or 'this size'}", group=group)
            found.setdefault(group, []).append((heading, cells))
    for group, rows in found.items():
        yield from rows
        yield Heading(title=PROJECTION, group=group), projected.get(group, {})


def _in_run(cost: Cost, arm: Sequence[Run], baseline: Sequence[Run]) -> Entry | None:
    """The speed-up by the curves of one size; over all pairs of seeds."""
    ours, theirs = (
        [curve for run in runs if (curve := cost.curve(run))] for runs in (arm, baseline)
    )
    if not ours or not theirs:
        return None
    logs, bounds = list[list[float]](), set[str]()
    for mine in ours:
        loss = mine[-1][0]
        own = where_reached(mine, loss) or mine[-1][1]
        row = []
        for curve in theirs:
            paid = where_reached(curve, loss)
            if paid is None:
                above = curve[0][0] > loss
                bounds.add("≥" if above else "≤")
                paid = curve[-1][1] if above else curve[0][1]
            row.append(math.log(paid / own))
        logs.append(row)
    rows = [fmean(row) for row in logs]
    columns = [fmean(column) for column in zip(*logs, strict=True)]
    text = f"{_ratio(math.exp(fmean(rows)))} ×"
    if bounds:
        final = compare([curve[-1][0] for curve in ours], [curve[-1][0] for curve in theirs])
        if final is not None and final.interval and final.verdict is Verdict.UNDECIDED:
            seen = f"±{style.number(final.decidable or 0.0, 2)}"
            return Entry(
                text="undecided", note=f"final losses differ by less than seeds decide: {seen}"
            )
        if len(bounds) > 1:
            return Entry(text="none", note="some seeds are out of reach on either side")
        bound = bounds.pop()
        note = "never reached" if bound == "≥" else "reached before the first measurement"
        return Entry(text=f"{bound} {text}", note=note)
    # Seeds of both arms spread it: of the baseline as much as its columns differ, the other way.
    spread = compare(rows, [fmean(rows) - one for one in columns])
    assert spread is not None
    ends = spread.interval and (math.expm1(spread.interval[0]), math.expm1(spread.interval[1]))
    difference = Difference(mean=math.expm1(spread.mean), interval=ends, p=spread.p)
    text += _interval(1 + end for end in ends) if ends else ""
    return Entry(text=text, detail="mean over pairs of seeds", difference=difference)


def _ratio(value: float) -> str:
    """A ratio to three digits, within what is worth telling apart."""
    if not LEAST < value < MOST:
        return f"over {MOST}" if value > 1 else f"under {LEAST}"
    return style.number(value)


def _interval(ends: Iterable[float]) -> str:
    return f" [{', '.join(map(_ratio, ends))}]"


@dataclass(frozen=True, kw_only=True)
class _Law:
    """Laws of an arm and its baseline in one cost, and the largest that each of them paid."""

    name: str
    laws: PowerLaws
    largest: float
    paid: float

    def entry(self, cost: float) -> Entry:
        """The speed-up at a cost of the arm's."""
        ratio, interval = self.laws.speedup(cost), self.laws.interval_of_speedup(cost)
        text = f"{_ratio(ratio)} ×{'' if interval is None else _interval(interval)}"
        far = cost > self.paid * (1 + 1e-9) or ratio * cost > self.largest * (1 + 1e-9)
        return Entry(text=text, note=POOR if self.poor else "extrapolated" if far else "")

    @property
    def poor(self) -> bool:
        """True if the sizes lie too far off the law for its numbers to be used."""
        return math.expm1(self.laws.misfit) > POOR_FROM

    @property
    def in_words(self) -> str:
        """The fitted numbers."""
        alphas = []
        for variant, exponent in enumerate(self.laws.exponents):
            interval = self.laws.interval_of_exponent(bool(variant))
            error = "" if interval is None else f" {style.interval(*interval)}"
            alphas.append(f"{style.number(exponent)}{error}")
        return (
            f"{self.name}: E {style.number(self.laws.floor)} nats, α of the arm {alphas[1]}, of "
            f"the baseline {alphas[0]}; the law misses a size’s mean loss by up to "
            f"{style.percent(math.expm1(self.laws.misfit))}{': ' + WARNING if self.poor else ''}."
        )


Laws = dict[tuple[str, str, str], _Law]  # by label, arm and cost
Sizes = tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
_fitted = cache(fit)


def _laws(records: Records) -> Laws:
    """The laws of ladders with enough sizes: runs of one text and one recipe."""
    by_recipe: dict[str, list[Run]] = {}
    for run in records.runs:
        train, data = (run.header.get(name) or {} for name in ("train", "data"))
        recipe = [train.get(name) for name in RECIPE]
        key = str([data.get("fingerprint"), run.header.get("objective"), *recipe])
        by_recipe.setdefault(key, []).append(run)
    found: Laws = {}
    for runs in by_recipe.values():
        ladder = Records(runs=tuple(runs))
        reference, *arms = ladder.arms()
        sizes = {run.header.get("non_embedding_parameters") for run in ladder.of(reference)}
        for arm in arms if len(sizes) >= SIZES else ():
            for cost in COSTS:
                sides = [_final(cost, cost.comparable(ladder), name) for name in (reference, arm)]
                if min(map(len, sides)) < SIZES:
                    continue
                group = f"{arm} over {reference}"
                largest, paid = (max(fmean(costs) for costs, _ in side) for side in sides)
                law = _Law(
                    name=f"{group}, {cost.title}", laws=_fitted(*sides), largest=largest, paid=paid
                )
                found |= {(label, group, cost.title): law for label in ladder.labels()}
    return found


def _final(cost: Cost, records: Records, arm: str) -> Sizes:
    """Costs and final losses of an arm's seeds at each size."""
    sizes = []
    for label in records.labels():
        runs = [
            (whole, loss)
            for run in records.labelled(label).of(arm)
            if (whole := cost.whole(run)) is not None
            and (loss := run.value("loss", length=run.sequence_length)) is not None
        ]
        if runs:
            costs, losses = zip(*runs, strict=True)
            sizes.append((costs, losses))
    return tuple(sizes)
