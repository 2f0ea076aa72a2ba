"""Charts of several arms: over training, over length and over layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from clearhead.records.frame import frame
from clearhead.records.runs import DIMENSIONS, Records, ordered_maps
from clearhead.report.charts import Curves, Looks, chart, heads_map, with_map
from clearhead.report.page import Panel, Scale
from clearhead.report.quantities import SHARE

if TYPE_CHECKING:
    import pandas

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


def numbers(records: Records, metric: str, across: str, **at: Any) -> "pandas.DataFrame":
    """The rows of a metric (`records.frame`) that have all of these dimensions, `across` besides,
    and no others; infinite where they are not finite."""
    rows = frame({"": records}, metric)
    absent = [name for name in DIMENSIONS if at.get(name) is None and name != across]
    rows = rows[rows[absent].isna().all(axis=1)]
    for name, value in at.items():
        rows = rows if value is None else rows[rows[name] == value]
    return finite(rows)


def finite(rows: "pandas.DataFrame") -> "pandas.DataFrame":
    """Without missing values; infinite are those that are not finite, and all means of them."""
    lost = rows["measure"].map(lambda one: one.not_finite).astype(bool)
    return rows.assign(value=rows["value"].mask(lost, math.inf)).dropna(subset="value")


def curves(records: Records, rows: "pandas.DataFrame", across: str, name: str = "") -> Curves:
    """A line of each arm, and of each value of the column `name`: along `across` the mean over
    seeds and its deviation, within a seed the mean of all rows."""
    by = ["arm", *([name] if name else []), across]
    means = rows.groupby([*by, "seed"], sort=False, observed=True)["value"].mean()
    over = means.groupby(by, observed=True).agg(["mean", "std"]).fillna({"std": 0.0}).reset_index()
    names = [*dict.fromkeys(rows[name])] if name else [""]
    found: Curves = {(arm, one): [] for arm in records.arms() for one in names}
    for row in over[over["mean"] < math.inf].to_dict("records"):
        x = row[across]
        x = int(x) if isinstance(x, float) and x.is_integer() else x
        found[row["arm"], row.get(name, "")].append((x, row["mean"], row["std"]))
    return found


def loss(records: Records, looks: Looks, against: Literal["tokens", "seconds"]) -> Panel | None:
    """Training loss against tokens or time: mean over seeds, band of ± 1 standard deviation.

    By time only the runs of one device are drawn.
    """
    import pandas

    alike = records.on_one_device() if against == "seconds" else records
    others = len(records.runs) - len(alike.runs)
    read = [{"arm": run.arm, "seed": run.seed, **step} for run in alike.runs for step in run.steps]
    steps = pandas.DataFrame(read, columns=["arm", "seed", "step", "loss", against]).dropna()
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
    lines: Curves = {
        (arm, ""): [*spread.fillna(0.0).loc[arm].itertuples(index=False, name=None)]
        for arm in alike.arms()
        if arm in spread.index
    }
    # The steep start would press all that follows into a line.
    settled = [y for one in lines.values() for _, y, _ in one[len(one) // 20 :]]
    crop = max(map(len, lines.values())) >= POINTS // 2
    smoothing = "none" if width == 1 else f"each point is the mean over {width} steps"
    notes = [f"Smoothing: {smoothing}."]
    notes += ["The first 5 % lie above the frame; a double click shows them."] * crop
    left_out = f"On other devices or in another precision, left out: {others}."
    notes += [left_out] * (others > 0)
    return chart(
        f"Training loss {'by tokens read' if against == 'tokens' else 'by time on this machine'}",
        lines,
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
    lines = curves(records, numbers(records, "perplexity", "length"), "length")
    missing: dict[str, list[str]] = {}
    for arm in records.arms():
        for length in records.dimension("perplexity", "length", task=None):
            if reason := records.reason(arm, "perplexity", length=length):
                missing.setdefault(f"at {length:,} tokens: {reason}.", []).append(arm)
    if len({length for points in lines.values() for length, *_ in points}) + len(missing) < 2:
        return None
    reasons = [f"{', '.join(arms)} {reason}" for reason, arms in missing.items()]
    title = "Perplexity by length of text"
    return by_length(records, looks, lines, title, "validation perplexity", " ".join(reasons))


def by_length(
    records: Records, looks: Looks, lines: Curves, title: str, axis: str, note: str = ""
) -> Panel | None:
    """A line for each arm and variant by length of the text; the training length is marked."""
    trained = records.sequence_length()
    return chart(
        title,
        lines,
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
    found: Curves = {}
    for one in lines:
        rows = numbers(records, one.metric, "layer", **one.dimensions)
        rows = rows[rows["value"] > 0] if log else rows
        for (arm, _), points in curves(records, rows, "layer").items():
            found[arm, one.name] = points
    ordered = {(arm, one.name): found[arm, one.name] for arm in records.arms() for one in lines}
    up = "auto" if log else "zero"
    return chart(title, ordered, looks, "layer", axis, across="layers", up=up, note=note)


def largest_share(records: Records) -> float:
    """The largest first-token share of any head: where a colour scale for all models ends."""
    values = (one.value for run in records.runs for one in run.select(SHARE))
    return max((value for value in values if value is not None), default=1.0)


def share_scale(largest: float) -> Scale:
    """The colour scale of `first_token_share`."""
    ticks = tuple(f"{100 * largest * part:.0f} %" for part in (0, 0.5, 1))
    return Scale(name="share of queries", ticks=ticks)


def first_token_share(records: Records, largest: float) -> list[Panel]:
    """One heat-map (layer × head) an arm and map, on one colour scale from 0 to `largest`.

    Heads of different seeds do not correspond, so the first seed is shown and not a mean.
    """
    panels = []
    for arm in records.arms():
        run = records.of(arm)[0]
        for name in ordered_maps({one.dimensions.get("map", "") for one in run.select(SHARE)}):
            cells = {
                (one.dimensions["layer"], one.dimensions["head"]): 100 * one.value
                for one in run.select(SHARE, map=name)
                if {"layer", "head"} <= one.dimensions.keys() and one.value is not None
            }
            if not cells:
                continue
            figure = heads_map(cells, 100 * largest)
            title = with_map(arm, name)
            described = f"first token’s share in {title}"
            panels.append(Panel(title=title, figure=figure, shape="cells", described=described))
    return panels
