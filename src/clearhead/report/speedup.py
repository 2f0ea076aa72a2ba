"""Effective speed-up: what the baseline pays to reach an arm's loss, over what the arm paid.

At each size the last loss on the way is looked up on the baseline's own curve. A rate that decays
makes that a bound: a baseline that was trained for less, down to its lowest rate, would have been
there sooner. Over three sizes or more power laws of the final losses (`power_laws`) answer for any
cost, also beyond those that were paid.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from clearhead.records.runs import Records, Run
from clearhead.report import narrative, style
from clearhead.report.charts import where_reached
from clearhead.report.milestones import steps_of
from clearhead.report.page import Block, Notes, Section, section
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.power_laws import PowerLaws, fit
from clearhead.report.statistics import Difference, Verdict, compare

SIZES = 3  # with fewer no power law is fitted
LEAST, MOST = 0.01, 100  # ratios told apart
PROJECTED = 10  # times the largest cost


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A cost of training, read from a run's steps."""

    title: str
    rate: Callable[[Run], float | None]
    counter: str
    """The field of a step that the rate is of."""
    one_device: bool = False

    def comparable(self, records: Records) -> Records:
        """The runs whose costs compare."""
        return records.on_one_device() if self.one_device else records

    def at(self, run: Run) -> dict[int, float]:
        """{step: cost up to it}."""
        rate = self.rate(run)
        if rate is None:
            return {}
        return {
            int(step["step"]): rate * step[self.counter]
            for step in run.steps
            if step.get(self.counter) is not None
        }

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


def speedup_section(records: Records) -> Section | None:
    """A row for each arm at each size, and at ten times the largest cost; None without curves."""
    columns = [
        (Heading(group=f"Speed-up in {cost.title}", title=title), (cost.title, title))
        for cost in COSTS
        for title in (IN_RUN, FITTED)
    ]
    table = build(
        "effective speed-up",
        _rows(records),
        columns,
        lambda cells, column: (cells[column],) if column in cells else (),
        corner="size",
    )
    if table is None:
        return None
    fits = tuple(dict.fromkeys(one.in_words for one in _laws(records).values()))
    blocks: list[Block] = [table]
    if fits:
        blocks.append(Notes(texts=fits))
    return section("comparison.speed-up", answer(table), blocks)


def answer(table: Pivot) -> str:
    """The last row of each arm, in words: by the fit, and else in the run."""
    last: dict[str, str] = {}
    for row, cells in zip(table.rows, table.cells, strict=True):
        said: dict[str, str] = {}
        for column, cell in zip(table.columns, cells, strict=True):
            if cell:  # the fit stands after the run
                said[column.group.removeprefix("Speed-up in ")] = cell[0].text
        words = [f"{text} in {cost}" for cost, text in said.items()]
        last[row.group] = f"{row.group} {row.title}: {narrative.enumerate_words(words)}"
    more = "; …" * (len(last) > narrative.MANY)
    return f"Effective speed-up: {'; '.join([*last.values()][: narrative.MANY])}{more}."


def _rows(records: Records) -> Iterator[tuple[Heading, Cells]]:
    laws = _laws(records)
    found: dict[str, list[tuple[Heading, Cells]]] = {}
    ladders: dict[str, Ladder] = {}
    for label in records.labels():
        labelled = records.labelled(label)
        reference, *arms = labelled.arms()
        ladder = _ladder(labelled)
        for arm in arms:
            group = f"{arm} over {reference}"
            cells: Cells = {}
            for cost in COSTS:
                alike = cost.comparable(labelled)
                one = _in_run(cost, alike.of(arm), alike.of(reference))
                if one is not None:
                    cells[cost.title, IN_RUN] = one
                law = laws.get((ladder, group, cost.title))
                paid = [whole for run in alike.of(arm) if (whole := cost.whole(run)) is not None]
                if law is not None and paid:
                    cells[cost.title, FITTED] = law.entry(fmean(paid))
            heading = Heading(title=f"at {label or 'this size'}", group=group)
            found.setdefault(group, []).append((heading, cells))
            ladders[group] = ladder
    for group, rows in found.items():
        yield from rows
        projected: Cells = {
            (cost.title, FITTED): law.entry(PROJECTED * law.largest)
            for cost in COSTS
            if (law := laws.get((ladders[group], group, cost.title))) is not None
        }
        yield Heading(title=f"projected to {PROJECTED} × the largest cost", group=group), projected


def _in_run(cost: Cost, arm: Sequence[Run], baseline: Sequence[Run]) -> Entry | None:
    """The speed-up by the curves of one size; over all pairs of seeds."""
    ours = [curve for run in arm if (curve := cost.curve(run))]
    theirs = [curve for run in baseline if (curve := cost.curve(run))]
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
    ratio = math.exp(fmean(rows))
    text = f"{style.number(ratio)} ×"
    if bounds:
        final = compare([curve[-1][0] for curve in ours], [curve[-1][0] for curve in theirs])
        if final is not None and final.interval and final.verdict is Verdict.UNDECIDED:
            assert final.decidable is not None
            seen = f"±{style.number(final.decidable, 2)}"
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
    return Entry(text=text, detail="mean over pairs of seeds", difference=_as_ratio(spread))


def _as_ratio(log: Difference) -> Difference:
    """A difference of logarithms as that of the ratio to 1."""
    interval = log.interval and (math.expm1(log.interval[0]), math.expm1(log.interval[1]))
    return Difference(mean=math.expm1(log.mean), interval=interval, p=log.p)


def _ratio(value: float) -> str:
    """A ratio to three digits, within what is worth telling apart."""
    if not LEAST < value < MOST:
        return f"over {MOST}" if value > 1 else f"under {LEAST}"
    return style.number(value)


Ladder = tuple[str, ...]
Sizes = tuple[tuple[float, tuple[float, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class _Law:
    """Laws of an arm and its baseline in one cost; `largest` is the baseline's largest cost."""

    name: str
    laws: PowerLaws
    largest: float

    def entry(self, cost: float) -> Entry:
        """The speed-up at a cost of the arm's."""
        ratio, interval = self.laws.speedup(cost), self.laws.interval_of_speedup(cost)
        text = f"{_ratio(ratio)} ×"
        if interval is not None:
            text += f" [{', '.join(map(_ratio, interval))}]"
        far = max(cost, ratio * cost) > self.largest * (1 + 1e-9)
        return Entry(text=text, note="extrapolated" if far else "")

    @property
    def in_words(self) -> str:
        """The fitted numbers."""
        alphas = []
        for variant, exponent in enumerate(self.laws.exponents):
            interval = self.laws.interval_of_exponent(bool(variant))
            alphas.append(style.number(exponent))
            if interval is not None:
                alphas[-1] += f" {style.interval(*interval)}"
        return (
            f"{self.name}: E {style.number(self.laws.floor)} nats, α of the arm {alphas[1]}, of "
            f"the baseline {alphas[0]}; the law misses a size’s mean loss by up to "
            f"{style.percent(math.expm1(self.laws.misfit))}."
        )


def _laws(records: Records) -> dict[tuple[Ladder, str, str], _Law]:
    """By ladder, arm and cost, of ladders with enough sizes."""
    found: dict[tuple[Ladder, str, str], _Law] = {}
    ladders = dict.fromkeys(_ladder(records.labelled(label)) for label in records.labels())
    for ladder in filter(None, ladders):
        runs = Records(runs=tuple(run for run in records.runs if _sizes(run) == ladder))
        reference, *arms = runs.arms()
        for arm in arms:
            for cost in COSTS:
                alike = cost.comparable(runs)
                sides = [_final(cost, alike, name) for name in (reference, arm)]
                if min(map(len, sides)) >= SIZES:
                    group = f"{arm} over {reference}"
                    found[ladder, group, cost.title] = _Law(
                        name=f"{group}, {cost.title}",
                        laws=_fitted(*sides),
                        largest=max(one for one, _ in sides[0]),
                    )
    return found


_fitted = cache(fit)


def _sizes(run: Run) -> Ladder:
    """The sizes of the ladder that a run is of; none where it is of none."""
    return tuple(run.header.get("sizes") or ())


def _ladder(records: Records) -> Ladder:
    (one, *others) = dict.fromkeys(map(_sizes, records.runs))
    return () if others else one


def _final(cost: Cost, records: Records, arm: str) -> Sizes:
    """(mean cost, final losses of the seeds) of an arm at each size."""
    found = []
    for label in records.labels():
        runs = [
            (whole, loss)
            for run in records.labelled(label).of(arm)
            if (whole := cost.whole(run)) is not None
            and (loss := run.value("loss", length=run.sequence_length)) is not None
        ]
        if runs:
            costs, losses = zip(*runs, strict=True)
            found.append((fmean(costs), losses))
    return tuple(found)
