"""Figures of a diagnosis: by layer, by distance, by rank and by position."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.diagnosis import INPUT, Diagnosed
from clearhead.report.figures import Looks, Panel, log_axis, mark_length, new

if TYPE_CHECKING:
    import plotly.graph_objects as go

# By the names of plotly, and by those of people.
_DASHES = {"solid": "solid", "dot": "dotted", "dash": "dashed", "longdash": "in long dashes"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure by layer: a metric at its dimensions, and what tells it from others."""

    metric: str
    name: str = ""
    dimensions: dict[str, Any] = field(default_factory=dict)


def by_layer(
    models: Sequence[Diagnosed],
    looks: Looks,
    title: str,
    axis: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    note: str = "",
) -> Panel | None:
    """A line a model and `Line`: colour says which model, dash which line."""
    figure = new("layer", axis)
    dashes = dict(zip((line.name for line in lines), cycle(_DASHES), strict=False))
    told: set[str] = set()
    shown: list[float] = []
    layers: set[int] = set()
    for model in models:
        found = [(line, model.by_layer(line.metric, **line.dimensions)) for line in lines]
        found = [(line, points) for line, points in found if points]
        for line, points in found:
            dash = dashes[line.name]
            name = f"{model.name} · {line.name}" if line.name else model.name
            trace(figure, list(points), list(points.values()), name, looks[model.name], dash)
            shown += points.values()
            layers |= points.keys()
            told.add(line.name)
    if not shown:
        return None
    places = sorted(layers)
    every = max(1, len(places) // 12)
    ticks = [n for n in places if n == INPUT or n % every == 0]
    names = ["in" if n == INPUT else str(n) for n in ticks]
    figure.update_xaxes(tickvals=ticks, ticktext=names)
    if log and min(shown) > 0 and max(shown) > 4 * min(shown):
        log_axis(figure, axis, shown)
    elif min(shown) >= 0:
        figure.update_yaxes(rangemode="nonnegative")
    if len(told) > 1:
        ways = "; ".join(
            f"{_DASHES[dash]}: {name or 'softmax'}" for name, dash in dashes.items() if name in told
        )
        note = f"{note} {ways[:1].upper()}{ways[1:]}.".strip()
    if INPUT in layers:
        note = f"{note} “in” is the stream before the first layer.".strip()
    return Panel(title=title, figure=figure, note=note)


def trace(
    figure: "go.Figure",
    x: list[Any],
    y: list[Any],
    name: str,
    look: style.Look,
    dash: str = "solid",
    *,
    markers: bool = True,
) -> None:
    """Add a line with markers in a model's colour."""
    import plotly.graph_objects as go

    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            name=style.plain(name),
            mode="lines+markers" if markers else "lines",
            line={"color": look.colour, "width": 2, "dash": dash},
            marker={
                "color": look.colour,
                "size": 7,
                "symbol": look.symbol if dash == "solid" else f"{look.symbol}-open",
            },
            hovertemplate="%{x}: %{y:.4g}",
        )
    )


def distances(models: Sequence[Diagnosed], looks: Looks) -> Panel | None:
    """The share of attention by distance, over all layers."""
    figure = new("distance from the query (tokens)", "share of the weight")
    longest: list[str] = []
    for model in models:
        whole = [line for line in model.found("share_by_distance") if "layer" not in line]
        names = {line["map"] for line in whole}
        for line in whole:
            if "difference" in names and line["map"] != "difference":
                continue
            name = model.name if line["map"] == "softmax" else f"{model.name} · {line['map']}"
            trace(figure, line["x"], line["y"], name, looks[model.name])
            longest = max(longest, line["x"], key=len)
    if not longest:
        return None
    figure.update_xaxes(type="category", categoryarray=longest, categoryorder="array")
    return Panel(
        title="How far attention reaches",
        figure=figure,
        note="All layers, heads and queries. Of a signed difference, the signed weight.",
    )


def ranks(models: Sequence[Diagnosed], looks: Looks, kind: str, title: str) -> Panel | None:
    """The largest magnitudes by rank, and the median; `kind` is "hidden" or "logit"."""
    figure = new("rank", "magnitude")
    places = ["1", "2", "3", "10", "100", "median"]
    keys = [f"{kind}_median" if place == "median" else f"{kind}_top_{place}" for place in places]
    shown = []
    for model in models:
        values = [model.value(key) for key in keys]
        if any(value is not None for value in values):
            trace(figure, places, values, model.name, looks[model.name])
            shown += [value for value in values if value]
    if not shown:
        return None
    figure.update_xaxes(type="category", categoryarray=places, categoryorder="array")
    if max(shown) > 4 * min(shown):
        log_axis(figure, "magnitude", shown)
    return Panel(title=title, figure=figure)


def decay(models: Sequence[Diagnosed], looks: Looks) -> Panel | None:
    """The mean |score| of sampled pairs by distance, the content held, and its bound."""
    figure = new("distance (tokens)", "score")
    shown = []
    places: list[str] = []
    for model in models:
        for line in model.found("decay"):
            dash = "dot" if line["map"] == "bound" else "solid"
            names = [f"{x:,}" for x in line["x"]]
            name = f"{model.name} · {line['map']}"
            trace(figure, names, line["y"], name, looks[model.name], dash)
            shown += [y for y in line["y"] if y]
            places = max(places, names, key=len)
    if not shown:
        return None
    figure.update_xaxes(type="category", categoryarray=places, categoryorder="array")
    log_axis(figure, "score", shown)
    return Panel(
        title="Long-range decay against its bound",
        figure=figure,
        note="Sampled queries and keys, their content held and only the distance changed.",
    )


def positions(model: Diagnosed, curve: str, title: str, axis: str) -> Panel | None:
    """A curve by position beyond the training length: low layers against the last."""
    lines = model.found(curve)
    if not lines:
        return None
    figure = new("position in the text (tokens)", axis)
    looks = style.looks([f"layer {line['layer']}" for line in lines])
    last = max(line["layer"] for line in lines)
    for line in lines:
        look = looks[f"layer {line['layer']}"]
        name = f"layer {line['layer']}" + (" (the last)" if line["layer"] == last else "")
        dash = "solid" if line["layer"] == last else "dot"
        trace(figure, line["x"], line["y"], name, look, dash, markers=False)
    trained = model.value("trained_length")
    if trained is not None:
        mark_length(figure, trained, "training length", at=trained)
    return Panel(title=f"{title}: {model.name}", figure=figure, own_legend=True)


def spectrum(model: Diagnosed) -> Panel | None:
    """Singular values of attention's matrix: low layers against the last, and the first's C."""
    lines = model.found("spectrum")
    if not lines:
        return None
    figure = new("number", "singular value")
    looks = style.looks([f"layer {line['layer']}" for line in lines if "layer" in line])
    shown: list[float] = []
    for line in lines:
        name = f"layer {line['layer']}" if "layer" in line else "C: the first layer at W_Q = 0"
        look = looks.get(name) or next(iter(looks.values()))
        y = [value if value > 1e-6 else None for value in line["y"]]
        trace(
            figure, line["x"], y, name, look, "solid" if "layer" in line else "dot", markers=False
        )
        shown += [value for value in y if value is not None]
    log_axis(figure, "singular value", shown)
    return Panel(
        title=f"Spectrum of attention: {model.name}",
        figure=figure,
        note="Mean over heads, first tokens of one text. The flatter, the more directions survive.",
        own_legend=True,
    )


def heads(model: Diagnosed, name: str, largest: float) -> "go.Figure | None":
    """First-token share by layer and head, in %."""
    from clearhead.report.heatmaps import cells_figure

    cells = {
        (line["layer"], line["head"]): 100 * line["value"]
        for line in model.measures.values()
        if line["metric"] == "first_token_argmax_share"
        and line.get("map") == name
        and "head" in line
        and line["value"] is not None
    }
    return cells_figure(cells, 100 * largest) if cells else None
