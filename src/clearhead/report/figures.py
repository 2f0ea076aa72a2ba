"""Figures of several arms: curves over training, over length and over layers."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from clearhead.records.runs import INPUT, Records, Run
from clearhead.report import style
from clearhead.report.charts import (
    Looks,
    Point,
    line,
    mark_length,
    new,
    note_on_bars,
    points_of,
    scale_axis,
    some_of,
)
from clearhead.report.page import Panel
from clearhead.report.pivots import along, summary
from clearhead.report.statistics import summarize

if TYPE_CHECKING:
    import plotly.graph_objects as go

Curves = dict[tuple[str, str], list[Point]]
SHARES = ("acc", "forced", "share", "exact_match", "contained", "f1")  # parts of metrics' names
POINTS = 80  # of a training curve; each is the mean over a block of steps
# By the names of plotly, and by those of people.
DASHES = {"solid": "solid", "dot": "dotted", "dash": "dashed", "longdash": "in long dashes"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure by layer: a metric at its dimensions, and what tells it from others."""

    metric: str
    name: str = ""
    dimensions: dict[str, Any] = field(default_factory=dict)


def loss(records: Records, looks: Looks, against: Literal["tokens", "seconds"]) -> Panel | None:
    """Training loss against tokens or time: mean over seeds, band of ± 1 standard deviation.

    By time only the runs of one device are drawn.
    """
    runs = len(records.runs)
    if against == "seconds":
        records = records.on_one_device()
    others = runs - len(records.runs)
    last = max((run.steps[-1]["step"] for run in records.runs if run.steps), default=0)
    if not last:
        return None
    width = math.ceil(last / POINTS)
    curves = {arm: _blocks(records.of(arm), width, against) for arm in records.arms()}
    longest = max((x for curve in curves.values() for x, *_ in curve), default=0.0)
    if longest == 0:
        return None
    unit, divisor = _unit(longest, against)
    figure = new(
        f"tokens read ({unit})" if against == "tokens" else f"training time ({unit})",
        "loss (nats per token)",
        hovermode="closest",
    )
    for arm, curve in curves.items():
        _banded(figure, arm, [(x / divisor, *rest) for x, *rest in curve], looks[arm])
    smoothing = "none" if width == 1 else f"each point is the mean over {width} steps"
    start = _crop_start(figure, [[y for _, y, _ in curve] for curve in curves.values()])
    title = "by tokens read" if against == "tokens" else "by time on this machine"
    left_out = f" On other devices or in another precision, left out: {others}." if others else ""
    return Panel(
        title=f"Training loss {title}",
        figure=figure,
        note=f"Smoothing: {smoothing}.{start}{left_out}",
    )


def _crop_start(figure: "go.Figure", curves: Sequence[Sequence[float]]) -> str:
    """Let the axis begin after the steep start, which would press all that follows into a line."""
    settled = [curve[len(curve) // 20 :] for curve in curves if len(curve) >= POINTS // 2]
    if not settled:
        return ""
    low, high = min(map(min, settled)), max(map(max, settled))
    margin = 0.05 * (high - low)
    figure.update_yaxes(range=[low - margin, high + margin])
    return " The first 5 % lie above the frame; a double click shows them."


def _unit(longest: float, against: str) -> tuple[str, float]:
    if against == "tokens":
        return ("millions", 1e6) if longest >= 1e6 else ("thousands", 1e3)
    return ("minutes", 60.0) if longest >= 180 else ("seconds", 1.0)


def _blocks(runs: Sequence[Run], width: int, against: str) -> list[tuple[float, float, float]]:
    """(x, mean loss, deviation over seeds) for each block of `width` steps."""
    by_block: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        mine: dict[int, list[tuple[float, float]]] = {}
        for step in run.steps:
            if step.get("loss") is not None and step.get(against) is not None:
                point = (float(step[against]), float(step["loss"]))
                mine.setdefault((int(step["step"]) - 1) // width, []).append(point)
        for block, points in mine.items():
            x, y = (fmean(column) for column in zip(*points, strict=True))
            by_block.setdefault(block, []).append((x, y))
    curve = []
    for block in sorted(by_block):
        xs, ys = zip(*by_block[block], strict=True)
        over = summarize(ys)
        assert over is not None
        curve.append((fmean(xs), over.mean, over.deviation or 0.0))
    return curve


def _banded(figure: "go.Figure", arm: str, curve: list[Any], look: style.Look) -> None:
    """A line in a band of its spread."""
    import plotly.graph_objects as go

    if any(spread for _, _, spread in curve):
        x, y, spread = (list(column) for column in zip(*curve, strict=True))
        upper = [mean + one for mean, one in zip(y, spread, strict=True)]
        lower = [mean - one for mean, one in zip(y, spread, strict=True)]
        band = go.Scatter(
            x=x + x[::-1],
            y=upper + lower[::-1],
            fill="toself",
            fillcolor=look.colour,
            opacity=0.16,
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=style.plain(arm),
        )
        figure.add_trace(band)
    line(figure, arm, [(x, y, None) for x, y, _ in curve], look, size=0)


def perplexity_by_length(records: Records, looks: Looks) -> Panel | None:
    """Validation perplexity against the length of the text; the training length is marked.

    None where one length was measured, and none failed: a point is no line.
    """
    curves: Curves = {}
    missing: dict[str, list[str]] = {}
    for arm in records.arms():
        for length in records.dimension("perplexity", "length", task=None):
            over = summary(records, arm, "perplexity", length=length)
            if over is not None:
                point = (length, over.mean, over.deviation)
                curves.setdefault((arm, ""), []).append(point)
            elif reason := records.reason(arm, "perplexity", length=length):
                missing.setdefault(f"at {length:,} tokens: {reason}.", []).append(arm)
    lengths = {length for points in curves.values() for length, *_ in points}
    if not curves or len(lengths) + len(missing) < 2:
        return None
    reasons = [f"{', '.join(arms)} {reason}" for reason, arms in missing.items()]
    title = "Perplexity by length of text"
    return by_length(records, looks, curves, title, "validation perplexity", " ".join(reasons))


def by_length(
    records: Records, looks: Looks, curves: Curves, title: str, axis: str, note: str = ""
) -> Panel:
    """A line for each arm and variant by length of the text; the training length is marked.

    Args:
        curves: (length, mean, deviation over seeds) by arm and variant; its dash says which.
        axis: the quantity; that of a share ends at 1.
    """
    figure = new("length of the text (tokens, log scale)", axis)
    remarks = _draw(figure, looks, curves, dict.fromkeys(name for _, name in curves))
    lengths = sorted({length for points in curves.values() for length, *_ in points})
    figure.update_xaxes(
        type="log", tickvals=lengths, ticktext=[f"{length:,}" for length in lengths]
    )
    if any(word in axis for word in SHARES):
        figure.update_yaxes(range=[0, 1])
        figure.update_traces(cliponaxis=False)
    else:
        scale_axis(figure, axis, _means(curves))
    trained = records.sequence_length()
    if trained:
        # On a log axis shapes take the value itself, annotations its logarithm.
        mark_length(figure, trained, "trained at this length", at=math.log10(trained))
    return Panel(title=title, figure=figure, note=" ".join(filter(None, [*remarks, note])))


def loss_by_position(records: Records, looks: Looks, task: str, scaling: str) -> Panel | None:
    """The mean loss up to each position of the longest texts, a line a model."""
    figure = new("tokens of context, up to (log scale)", "cumulative loss (nats a token)")
    for arm in records.arms():
        curves: dict[int, list[float]] = defaultdict(list)
        for run in records.of(arm):
            longest = max(
                reversed(run.payload("curve", curve="cumulative_loss", task=task, scaling=scaling)),
                key=lambda curve: curve.get("length", 0),
                default={"x": (), "y": ()},
            )
            for x, y in zip(longest["x"], longest["y"], strict=True):
                if y is not None:
                    curves[x].append(y)
        points = [(place, fmean(curves[place]), None) for place in sorted(curves)]
        line(figure, arm, points, looks[arm], size=6)
    if not figure.data:
        return None
    figure.update_xaxes(type="log")
    return Panel(
        title="Loss of growing contexts",
        figure=figure,
        note="Without scaling; every position counts alike, whatever the number of tokens there.",
        described="cumulative loss by position",
    )


def _draw(
    figure: "go.Figure", looks: Looks, curves: Curves, names: Iterable[str], *, size: int = 8
) -> list[str]:
    """Draw a line for each arm and variant, whose dash is that of its place among `names`.

    Returns:
        What dashes and bars mean: "Solid: none; dotted: yarn × 2."
    """
    dashes = dict(zip(names, cycle(DASHES), strict=False))
    known: set[str] = set()
    for (arm, name), points in curves.items():
        shown = f"{arm} · {name}" if name and arm in known else arm
        line(
            figure, shown, points, looks[arm],
            dash=dashes[name], size=size, legend=arm not in known, group=arm,
        )  # fmt: skip
        known.add(arm)
    used = [name for name in dashes if any(name == one for _, one in curves)]
    ways = "; ".join(f"{DASHES[dashes[name]]}: {name or 'softmax'}" for name in used)
    key = f"{ways[:1].upper()}{ways[1:]}." if len(used) > 1 else ""
    return [key, note_on_bars(figure)]


def _means(curves: Curves) -> list[float]:
    return [mean for points in curves.values() for _, mean, _ in points]


def by_layer(
    records: Records,
    looks: Looks,
    title: str,
    axis: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    note: str = "",
) -> Panel | None:
    """A line an arm and `Line`: colour says which arm, dash which line."""
    curves: Curves = {}
    for arm in records.arms():
        for one in lines:
            points = points_of(along(records, arm, one.metric, "layer", **one.dimensions))
            if points := [point for point in points if point[1] > 0 or not log]:
                curves[arm, one.name] = points
    if not curves:
        return None
    figure = new("layer", axis)
    remarks = [note, *_draw(figure, looks, curves, [one.name for one in lines], size=7)]
    shown, layers = _means(curves), {layer for ones in curves.values() for layer, _, _ in ones}
    ticks = sorted({*some_of(sorted(layers)), *({INPUT} & layers)})
    names = ["in" if place == INPUT else str(place) for place in ticks]
    figure.update_xaxes(tickvals=ticks, ticktext=names)
    if log:
        scale_axis(figure, axis, shown)
    if min(shown) >= 0 and figure.layout.yaxis.type != "log":
        figure.update_yaxes(rangemode="nonnegative")
    if INPUT in layers:
        remarks.append("“in” is the stream before the first layer.")
    return Panel(title=title, figure=figure, note=" ".join(filter(None, remarks)))


def by_token(metric: str) -> list[Line]:
    """The first token and all others apart."""
    return [
        Line(metric=metric, name="first token", dimensions={"tokens": "first"}),
        Line(metric=metric, name="other tokens", dimensions={"tokens": "rest"}),
    ]
