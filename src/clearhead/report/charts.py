"""Charts by plotly, in the colours of a light page (`style.LIGHT_TO_DARK` translates them). Text
from records passes through `style.plain`, and never enters a hover template."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from clearhead.records.runs import INPUT, Records
from clearhead.report import style
from clearhead.report.page import Panel
from clearhead.report.pivots import SHARE, Quantity, models

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

Looks = dict[str, style.Look]
Metrics = Mapping[str, tuple[str, Mapping[str, Any]]]  # by variant, a metric and its dimensions
Variants = Mapping[str, Mapping[Any, Quantity]]  # by name and place on the x axis
TICKS = 12  # layers or heads that an axis names
# By the names of plotly, and by those of people.
DASHES = {
    **{"solid": "solid", "dot": "dotted", "dash": "dashed", "longdash": "in long dashes"},
    **{"dashdot": "dashes and dots", "longdashdot": "long dashes and dots"},
}
SHARES = ("acc", "forced", "share", "exact_match", "contained", "f1")  # parts of metrics' names
POINTS = 80  # of a training curve; each is the mean over a block of steps
_MUTED = {"color": style.MUTED[0]}


def chart(
    title: str,
    curves: "pandas.DataFrame",
    looks: Looks,
    x: str,
    y: str,
    *,
    across: str | Sequence[str] = "",
    up: str = "",
    note: str = "",
    bands: bool = False,
) -> Panel | None:
    """The points of `lines`, arms by colour, variants by dash; the spread as bars, or as `bands`
    around lines without markers. The x axis is by number, "log", "layers", or has names `across`;
    `up` is a y axis by number, "auto" (log from a factor of four on), from "zero", or a "share"."""
    if curves.empty:
        return None
    figure = new(x, y)
    dashes = dict(zip(curves["variant"].unique(), cycle(DASHES), strict=False))
    for (arm, name), points in curves.groupby(["arm", "variant"], sort=False):
        look, dash = looks[arm], dashes[name]
        label = style.plain(f"{arm} · {name}" if name else arm)
        places, values, spread = (points[column].tolist() for column in ("x", "y", "spread"))
        line: dict[str, Any] = {"x": places, "y": values, "name": label, "mode": "lines"}
        if not bands:
            symbol = look.symbol if dash == "solid" else f"{look.symbol}-open"
            line["mode"] = "lines+markers"
            line["marker"] = {"color": look.colour, "size": 8, "symbol": symbol}
        if any(spread) and bands:  # beneath the line
            high, low = points["y"] + points["spread"], points["y"] - points["spread"]
            band = {"x": places + places[::-1], "y": [*high, *low[::-1]], "hoverinfo": "skip"}
            fill = {"fill": "toself", "fillcolor": look.colour, "opacity": 0.16}
            figure.add_scatter(**band, **fill, mode="lines", line={"width": 0})
        elif any(spread):
            bars = {"color": look.colour, "thickness": 1.2, "width": 4}
            line["error_y"] = {"array": spread, **bars}
        width = {"color": look.colour, "width": 2, "dash": dash}
        figure.add_scatter(**line, line=width, hovertemplate="%{x}: %{y:.5g}")
    xs, lowest, highest = {*curves["x"]}, curves["y"].min(), curves["y"].max()
    if across == "log":
        ticks = sorted(xs)
        named = {"tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}
        figure.update_xaxes(type="log", **(named if len(ticks) <= TICKS else {}))
    elif across == "layers":
        ticks = sorted({*some_of(sorted(xs)), *({INPUT} & xs)})
        names = ["in" if n == INPUT else f"{n}" for n in ticks]
        figure.update_xaxes(tickvals=ticks, ticktext=names)
    elif across:
        figure.update_xaxes(type="category", categoryarray=[*across], categoryorder="array")
    if up == "share":
        figure.update_yaxes(range=[0, 1])
        figure.update_traces(cliponaxis=False)
    elif up == "auto" and highest >= 4 * lowest > 0:
        axis = {"type": "log", "title": {"text": f"{y} (log scale)"}, "dtick": "D2"}
        figure.update_yaxes(**axis, tickformat=",~g")
    elif up == "zero" and lowest >= 0:
        figure.update_yaxes(rangemode="tozero")
    ways = "; ".join(f"{DASHES[dash]}: {name}" for name, dash in dashes.items())
    remarks = {
        note: True,
        f"{ways[:1].upper()}{ways[1:]}.": len(dashes) > 1,
        "Bars: ± 1 standard deviation over seeds.": any(one.error_y.color for one in figure.data),
        "“in” is the stream before the first layer.": across == "layers" and INPUT in xs,
    }
    words = " ".join(remark for remark, holds in remarks.items() if remark and holds)
    return Panel(title=title, figure=figure, note=words)


def new(x: str, y: str) -> "go.Figure":
    """An empty figure with axes named `x` and `y`."""
    import plotly.graph_objects as go

    clear = "rgba(0,0,0,0)"
    grid = {"gridcolor": style.GRID[0], "linecolor": style.GRID[0]}
    axis = {**grid, "zeroline": False, "automargin": True, "ticks": ""}
    hover = {"bgcolor": style.PAPER[0], "bordercolor": style.GRID[0], "namelength": -1}
    layout = {
        **{"template": {}, "autosize": True, "showlegend": False, "hovermode": "closest"},
        **{"paper_bgcolor": clear, "plot_bgcolor": clear},
        "font": {"family": style.FONT, "size": 13, **_MUTED},
        "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
        "hoverlabel": {**hover, "font": {"color": style.INK[0]}},
        "modebar": {"bgcolor": clear, **_MUTED},
        "xaxis": {**axis, "title": {"text": x, "font": {"size": 13}}},
        # With a standoff the title keeps clear of tick labels of any width.
        "yaxis": {**axis, "title": {"text": y, "font": {"size": 13}, "standoff": 6}},
    }
    return go.Figure(layout=layout)


def some_of(places: Sequence[int]) -> list[int]:
    """Every n-th of the places, so that an axis can name them."""
    every = math.ceil(len(places) / TICKS)
    return [place for place in places if every == 1 or place % every == 0]


def lines(records: Records, variants: Variants) -> "pandas.DataFrame":
    """Mean `y` and `spread` over seeds by `arm`, `variant` and place `x`, where all are finite."""
    import pandas

    several = len(records.labels()) > 1
    points = []
    for model, (name, numbers) in product(models(records), variants.items()):
        variant = " · ".join(filter(None, (model.group * several, name)))
        for place, number in numbers.items():
            if (over := number.summary(model)) and not number.is_lost(model):
                points.append((model.arm, variant, place, over.mean, over.deviation or 0.0))
    return pandas.DataFrame(points, columns=["arm", "variant", "x", "y", "spread"])


def loss(records: Records, looks: Looks) -> Panel | None:
    """Training loss by tokens read of one label: mean over seeds, band of ± 1 standard deviation;
    without the steep start of a long curve, its first 5 %, which would flatten the rest."""
    import pandas

    rows = ({"arm": run.arm, "seed": run.seed, **one} for run in records.runs for one in run.steps)
    columns = ["arm", "seed", "step", "loss", "tokens"]
    steps = pandas.DataFrame(rows, columns=columns).dropna()
    if steps.empty:
        return None
    unit, words = (1e6, "millions") if steps["tokens"].max() >= 1e6 else (1e3, "thousands")
    width = math.ceil(steps["step"].max() / POINTS)
    start = POINTS // 20 if width > 1 else 0
    steps["block"] = (steps["step"] - 1) // width
    steps = steps[steps["block"] >= start]
    x = steps.groupby(["arm", "block"])["tokens"].mean() / unit
    y = steps.groupby(["arm", "block", "seed"])["loss"].mean().groupby(["arm", "block"])
    curves = pandas.DataFrame({"x": x, "y": y.mean(), "spread": y.std().fillna(0.0), "variant": ""})
    curves = curves.reindex(records.arms(), level="arm").reset_index()
    smoothed = f"Each point is the mean over {width} steps. The first 5 % are left out."
    title = ", ".join(filter(None, ("Training loss by tokens read", *records.labels())))
    axes = f"tokens read ({words})", "loss (nats per token)"
    return chart(title, curves, looks, *axes, bands=True, note=smoothed * (width > 1))


def perplexity_by_length(records: Records, looks: Looks) -> Panel | None:
    """Validation perplexity against the length of the text."""
    lengths = records.dimension("perplexity", "length", task=None)
    numbers = {n: Quantity("", metric="perplexity", at={"length": n}) for n in lengths}
    title = "Perplexity by length of text"
    return by_length(records, looks, {"": numbers}, title, "validation perplexity")


def by_length(
    records: Records, looks: Looks, variants: Variants, title: str, axis: str, note: str = ""
) -> Panel | None:
    """A line for each model and variant by length of the text; None of a single length."""
    curves = lines(records, variants)
    if curves["x"].nunique() < 2:
        return None
    x = "length of the text (tokens, log scale)"
    up = "share" if any(word in axis for word in SHARES) else "auto"
    trained = records.sequence_length()
    if trained:
        note = f"{note} The dotted line is the length in training.".strip()
    panel = chart(title, curves, looks, x, axis, across="log", up=up, note=note)
    if panel is not None and trained:
        panel.figure.add_vline(x=trained, line={**_MUTED, "width": 1, "dash": "dot"})
    return panel


def by_layer(
    records: Records, looks: Looks, title: str, axis: str, metrics: Metrics, up: str = "zero"
) -> Panel | None:
    """A line a model and variant, each a metric and its dimensions."""
    variants = {
        name: {
            layer: Quantity("", metric=metric, at={**at, "layer": layer})
            for layer in records.dimension(metric, "layer", **at)
        }
        for name, (metric, at) in metrics.items()
    }
    return chart(title, lines(records, variants), looks, "layer", axis, across="layers", up=up)


def first_token_share(records: Records) -> list[Panel]:
    """A heat-map of each arm and map: shares in per cent by layer and head of the first seed (heads
    of several do not correspond), with numbers where there is room, else with the colour scale."""
    import pandas

    rows = [
        {"arm": arm, "map": name, **one.dimensions, "share": 100 * one.value}
        for arm in records.arms()
        for name in records.dimension(SHARE, "map", arm)
        for one in records.of(arm)[0].select(SHARE, map=name)
        if one.value is not None
    ]
    columns = ["arm", "map", "layer", "head", "share"]
    shares = pandas.DataFrame(rows, columns=columns).dropna()
    largest = max(10.0, shares["share"].max())
    last = len(style.SEQUENTIAL) - 1
    scale = [[place / last, light] for place, (light, _) in enumerate(style.SEQUENTIAL)]
    panels = []
    for (arm, name), cells in shares.groupby(["arm", "map"], sort=False):
        grid = cells.pivot_table("share", "layer", "head", aggfunc="last")
        layers, heads = (axis.astype(int).tolist() for axis in grid.axes)
        few = len(heads) <= 8 and len(layers) <= TICKS
        colours = {"colorscale": scale, "showscale": not few, "zmin": 0, "zmax": largest}
        gap = 2 if few else 1
        figure = new("head", "layer")
        figure.add_heatmap(
            **{"x": heads, "y": layers, "z": grid.values.tolist(), "xgap": gap, "ygap": gap},
            **colours,
            colorbar={"ticksuffix": " %", "thickness": 8, "outlinewidth": 0},
            texttemplate="%{z:.0f}" if few else "",
            hovertemplate="layer %{y}, head %{x}: %{z:.2f} %<extra></extra>",
        )
        figure.update_xaxes(showgrid=False, tickvals=some_of(heads))
        figure.update_yaxes(showgrid=False, tickvals=some_of(layers), autorange="reversed")
        title = arm if name == "softmax" else f"{arm} · {name}"
        panels.append(Panel(title=title, figure=figure, shape="cells"))
    return panels
