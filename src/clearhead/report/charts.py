"""The house's style for figures: axes, lines, marks and heat-maps.

Every figure is built in the colours of a light page; `style.LIGHT_TO_DARK` translates them. Text
from records passes through `style.plain`, and never enters a hover template.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.statistics import Summary

if TYPE_CHECKING:
    import plotly.graph_objects as go

Looks = dict[str, style.Look]
Point = tuple[Any, float, float | None]  # x, y and its spread
TICKS = 12  # layers or heads that an axis names


def points_of(summaries: Mapping[Any, Summary | None]) -> list[Point]:
    """The points of a line, where there are numbers."""
    return [(x, one.mean, one.deviation) for x, one in summaries.items() if one is not None]


def with_map(arm: str, name: str) -> str:
    """An arm and its attention map, where it has more than softmax's."""
    return arm if name == "softmax" else f"{arm} · {name}"


def new(x: str, y: str, **layout: Any) -> "go.Figure":
    """An empty figure with axes named `x` and `y`."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": style.GRID[0],
        "linecolor": style.GRID[0],
        "zeroline": False,
        "automargin": True,
        "ticks": "",
    }
    figure = go.Figure(
        layout={
            "template": {},
            "autosize": True,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": style.FONT, "size": 13, "color": style.MUTED[0]},
            "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
            "hoverlabel": {
                "bgcolor": style.PAPER[0],
                "bordercolor": style.GRID[0],
                "font": {"color": style.INK[0]},
                "namelength": -1,
            },
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "showlegend": True,
        }
    )
    figure.update_layout(**layout)
    figure.update_xaxes(title={"text": x, "font": {"size": 13}}, **axis)
    # With a standoff the title keeps clear of tick labels of any width.
    figure.update_yaxes(title={"text": y, "font": {"size": 13}, "standoff": 6}, **axis)
    return figure


def line(
    figure: "go.Figure",
    name: str,
    points: Sequence[Point],
    look: style.Look,
    *,
    dash: str = "solid",
    size: int = 8,
    legend: bool = True,
    group: str = "",
) -> None:
    """Add a line through the points, with bars where they have a spread.

    Args:
        size: of a marker; 0 draws none.
        group: lines that the legend shows and hides together; unless given, by name.
    """
    import plotly.graph_objects as go

    if not points:
        return
    x, y, spread = (list(column) for column in zip(*points, strict=True))
    trace = go.Scatter(
        x=x,
        y=y,
        name=style.plain(name),
        legendgroup=style.plain(group or name),
        showlegend=legend,
        mode="lines+markers" if size else "lines",
        line={"color": look.colour, "width": 2, "dash": dash},
        marker={
            "color": look.colour,
            "size": size,
            "symbol": look.symbol if dash == "solid" else f"{look.symbol}-open",
        },
        hovertemplate="%{x}: %{y:.5g}",
    )
    if any(spread):
        trace.error_y = {
            "type": "data",
            "array": [value or 0.0 for value in spread],
            "color": look.colour,
            "thickness": 1.2,
            "width": 4,
        }
    figure.add_trace(trace)


def note_on_bars(figure: "go.Figure") -> str:
    """The meaning of a figure's bars; "" where no line shows a spread."""
    shown = any(trace.error_y.array is not None for trace in figure.data)
    return "Bars: ± 1 standard deviation over seeds." * shown


def mark_length(figure: "go.Figure", trained: float, text: str, *, at: float) -> None:
    """A dotted line at the trained length; `at` is where the axis has the words beside it."""
    figure.add_shape(
        type="line",
        x0=trained,
        x1=trained,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": style.MUTED[0], "width": 1, "dash": "dot"},
    )
    figure.add_annotation(
        x=at,
        y=1,
        yref="paper",
        yanchor="top",
        xanchor="left",
        xshift=5,
        showarrow=False,
        text=text,
        font={"color": style.MUTED[0], "size": 11.5},
    )


def categories(figure: "go.Figure", names: Sequence[str]) -> None:
    """An x axis of names in this order."""
    figure.update_xaxes(type="category", categoryarray=list(names), categoryorder="array")


def scale_axis(figure: "go.Figure", name: str, shown: Sequence[float]) -> None:
    """A logarithmic y axis where `shown` spans more than a factor of four, and one that says so."""
    if shown and min(shown) > 0 and max(shown) >= 4 * min(shown):
        log_axis(figure, name, shown)


def log_axis(figure: "go.Figure", name: str, shown: Sequence[float]) -> None:
    """A logarithmic y axis that says so, with plain numbers at its ticks; `shown` are above 0."""
    low, high = min(shown) / 1.12, max(shown) * 1.12
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1e4 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    figure.update_yaxes(
        type="log",
        title={"text": f"{name} (log scale)"},
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[f"{tick:,g}" for tick in ticks],
    )


def some_of(places: Sequence[int]) -> list[int]:
    """Every n-th of the places, so that an axis can name them."""
    if len(places) <= TICKS:
        return list(places)
    every = math.ceil(len(places) / TICKS)
    return [place for place in places if place % every == 0]


def heat_map(
    x: Sequence[Any],
    y: Sequence[Any],
    z: Sequence[Sequence[float | None]],
    largest: float,
    *,
    titles: tuple[str, str],
    form: str,
    hover: str,
    custom: Sequence[Sequence[str]] | None = None,
) -> "go.Figure":
    """Cells on one colour scale from 0 to `largest`, with their numbers where there is room."""
    import plotly.graph_objects as go

    few = len(x) <= 8 and len(y) <= TICKS
    heat = go.Heatmap(
        x=list(x),
        y=list(y),
        z=[list(row) for row in z],
        zmin=0,
        zmax=largest or 1.0,
        colorscale=style.scale(style.SEQUENTIAL),
        showscale=False,
        xgap=2 if few else 1,
        ygap=2 if few else 1,
        texttemplate=f"%{{z:{form}}}" if few else "",
        customdata=custom,
        hovertemplate=hover + "<extra></extra>",
    )
    figure = new(*titles, showlegend=False)
    figure.add_trace(heat)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False, autorange="reversed")
    return figure


def where_reached(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """The y at which a curve first comes down to `x`; None where it starts below."""
    for (before, old), (after, new_) in pairwise(curve):
        if after <= x <= before:
            part = 0.0 if before == after else (before - x) / (before - after)
            return old + part * (new_ - old)
    return None
