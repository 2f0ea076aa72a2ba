"""Charts of several arms: over training, over length and over layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.records.runs import Records
from clearhead.report.charts import Curves, Looks, chart, points_of
from clearhead.report.page import Panel
from clearhead.report.pivots import along, summary

SHARES = ("acc", "forced", "share", "exact_match", "contained", "f1")  # parts of metrics' names
POINTS = 80  # of a training curve; each is the mean over a block of steps
UNITS = {
    "tokens": ((1e6, 1e6, "millions"), (0, 1e3, "thousands")),
    "seconds": ((180, 60, "minutes"), (0, 1, "seconds")),
}


@dataclass(frozen=True)
class Line:
    """One line of a chart by layer: a metric at its dimensions, and what tells it from others."""

    metric: str
    name: str = ""
    dimensions: dict[str, Any] = field(default_factory=dict)


def loss(records: Records, looks: Looks, against: Literal["tokens", "seconds"]) -> Panel | None:
    """Training loss against tokens or time: mean over seeds, band of ± 1 standard deviation.

    By time only the runs of one device are drawn.
    """
    import pandas

    alike = records.on_one_device() if against == "seconds" else records
    others = len(records.runs) - len(alike.runs)
    lines = [{"arm": run.arm, "seed": run.seed, **step} for run in alike.runs for step in run.steps]
    steps = pandas.DataFrame(lines, columns=["arm", "seed", "step", "loss", against]).dropna()
    if not len(steps) or not steps[against].max():
        return None
    longest, width = steps[against].max(), math.ceil(steps["step"].max() / POINTS)
    _, divisor, unit = next(one for one in UNITS[against] if longest >= one[0])
    steps[against] /= divisor
    block = ((steps["step"] - 1) // width).rename("block")
    means = steps.groupby(["arm", "seed", block], sort=False)[[against, "loss"]].mean()
    spread = means.groupby(["arm", "block"]).agg(
        x=(against, "mean"), y=("loss", "mean"), spread=("loss", "std")
    )
    curves: Curves = {
        (arm, ""): [*spread.fillna(0.0).loc[arm].itertuples(index=False, name=None)]
        for arm in alike.arms()
        if arm in spread.index
    }
    # The steep start would press all that follows into a line.
    settled = [y for one in curves.values() for _, y, _ in one[len(one) // 20 :]]
    crop = max(map(len, curves.values())) >= POINTS // 2
    smoothing = "none" if width == 1 else f"each point is the mean over {width} steps"
    notes = [f"Smoothing: {smoothing}."]
    notes += ["The first 5 % lie above the frame; a double click shows them."] * crop
    left_out = f"On other devices or in another precision, left out: {others}."
    notes += [left_out] * (others > 0)
    return chart(
        f"Training loss {'by tokens read' if against == 'tokens' else 'by time on this machine'}",
        curves,
        looks,
        f"{'tokens read' if against == 'tokens' else 'training time'} ({unit})",
        "loss (nats per token)",
        size=0,
        bands=True,
        note=" ".join(notes),
        span=settled if crop else (),
    )


def perplexity_by_length(records: Records, looks: Looks) -> Panel | None:
    """Validation perplexity against the length of the text; the training length is marked.

    None where one length was measured, and none failed: a point is no line.
    """
    lengths = records.dimension("perplexity", "length", task=None)
    curves: Curves = {}
    missing: dict[str, list[str]] = {}
    for arm in records.arms():
        over = {length: summary(records, arm, "perplexity", length=length) for length in lengths}
        curves[arm, ""] = points_of(over)
        for length in lengths:
            if reason := records.reason(arm, "perplexity", length=length):
                missing.setdefault(f"at {length:,} tokens: {reason}.", []).append(arm)
    if len({length for points in curves.values() for length, *_ in points}) + len(missing) < 2:
        return None
    reasons = [f"{', '.join(arms)} {reason}" for reason, arms in missing.items()]
    title = "Perplexity by length of text"
    return by_length(records, looks, curves, title, "validation perplexity", " ".join(reasons))


def by_length(
    records: Records, looks: Looks, curves: Curves, title: str, axis: str, note: str = ""
) -> Panel | None:
    """A line for each arm and variant by length of the text; the training length is marked."""
    trained = records.sequence_length()
    return chart(
        title,
        curves,
        looks,
        "length of the text (tokens, log scale)",
        axis,
        across="log",
        up="share" if any(word in axis for word in SHARES) else "auto",
        size=8,
        note=note,
        mark=(trained, "trained at this length") if trained else None,
    )


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
            curves[arm, one.name] = [point for point in points if point[1] > 0 or not log]
    up = "auto" if log else "zero"
    return chart(title, curves, looks, "layer", axis, across="layers", up=up, note=note)


def by_token(metric: str) -> list[Line]:
    """The first token and all others apart."""
    return [
        Line(metric, "first token", {"tokens": "first"}),
        Line(metric, "other tokens", {"tokens": "rest"}),
    ]
