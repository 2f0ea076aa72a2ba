"""Charts: lines of arms and their variants, heat-maps, and the axes they share.

Every figure is built in the colours of a light page; `style.LIGHT_TO_DARK` translates them. Text
from records passes through `style.plain`, and never enters a hover template.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from clearhead.records.runs import INPUT
from clearhead.report import style
from clearhead.report.page import Panel

if TYPE_CHECKING:
    import plotly.graph_objects as go

Looks = dict[str, style.Look]
Point = tuple[Any, float, float | None]  # x, y and its spread
Curves = dict[tuple[str, str], list[Point]]  # by arm and variant
TICKS = 12  # layers or heads that an axis names
# By the names of plotly, and by those of people.
DASHES = {"solid": "solid", "dot": "dotted", "dash": "dashed", "longdash": "in long dashes"}
_MUTED = {"color": style.MUTED[0]}


def with_map(arm: str, name: str) -> str:
    """An arm and its attention map, where it has more than softmax's."""
    return arm if name == "softmax" else f"{arm} · {name}"


def chart(
    title: str,
    curves: Curves,
    looks: Looks,
    x: str,
    y: str,
    *,
    across: str | Sequence[str] = "",
    up: str = "",
    note: str = "",
    size: int = 7,
    bands: bool = False,
    span: Sequence[float] = (),
    mark: tuple[float, str] | None = None,
    described: str = "",
) -> Panel | None:
    """Lines of arms by colour, of variants by dash; None without a point.

    Args:
        x, y: names of the axes.
        across: the x axis: "" by number, "log", "layers", or names in their order.
        up: the y axis: "" by number, "auto" (logarithmic where it spans a factor of four), "log",
            "zero" (from 0), or "share" (from 0 to 1).
        size: of a marker; 0 draws none.
        bands: a spread is a band, not bars.
        span: numbers that the y axis is fitted to, unless those shown.
        mark: a place across, and the words of the dotted line there.
    """
    curves = {place: points for place, points in curves.items() if points}
    if not curves:
        return None
    figure = new(x, y)
    dashes = dict(zip(dict.fromkeys(name for _, name in curves), cycle(DASHES), strict=False))
    known: set[str] = set()
    for (arm, name), points in curves.items():
        shown = f"{arm} · {name}" if name and arm in known else arm
        if bands:
            _add_band(figure, arm, points, looks[arm])
        _add_line(figure, shown, points, looks[arm], dashes[name], size, arm, bars=not bands)
        figure.data[-1].showlegend = arm not in known
        known.add(arm)
    _scale_x(figure, across, [x for points in curves.values() for x, *_ in points])
    values = [value for points in curves.values() for _, value, _ in points]
    _scale_y(figure, up, y, span or values, fit=bool(span))
    if mark is not None:
        _mark_length(figure, *mark, log=across == "log")
    ways = "; ".join(f"{DASHES[dash]}: {name or 'softmax'}" for name, dash in dashes.items())
    remarks = [note, f"{ways[:1].upper()}{ways[1:]}." if len(dashes) > 1 else ""]
    if any(trace.error_y.array is not None for trace in figure.data):
        remarks.append("Bars: ± 1 standard deviation over seeds.")
    if across == "layers" and any(x == INPUT for points in curves.values() for x, *_ in points):
        remarks.append("“in” is the stream before the first layer.")
    note = " ".join(filter(None, remarks))
    return Panel(title=title, figure=figure, note=note, described=described)


def new(x: str, y: str, **layout: Any) -> "go.Figure":
    """An empty figure with axes named `x` and `y`."""
    import plotly.graph_objects as go

    grid = {"gridcolor": style.GRID[0], "linecolor": style.GRID[0]}
    axis = {**grid, "zeroline": False, "automargin": True, "ticks": ""}
    figure = go.Figure(
        layout={
            "template": {},
            "autosize": True,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": style.FONT, "size": 13, **_MUTED},
            "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
            "hoverlabel": {
                "bgcolor": style.PAPER[0],
                "bordercolor": style.GRID[0],
                "font": {"color": style.INK[0]},
                "namelength": -1,
            },
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", **_MUTED},
            "showlegend": True,
            "hovermode": "closest",
            **layout,
        }
    )
    figure.update_xaxes(title={"text": x, "font": {"size": 13}}, **axis)
    # With a standoff the title keeps clear of tick labels of any width.
    figure.update_yaxes(title={"text": y, "font": {"size": 13}, "standoff": 6}, **axis)
    return figure


def _add_line(
    figure: "go.Figure",
    name: str,
    points: Sequence[Point],
    look: style.Look,
    dash: str,
    size: int,
    group: str,
    *,
    bars: bool,
) -> None:
    import plotly.graph_objects as go

    x, y, spread = (list(column) for column in zip(*points, strict=True))
    symbol = look.symbol if dash == "solid" else f"{look.symbol}-open"
    trace = go.Scatter(
        x=x,
        y=y,
        name=style.plain(name),
        legendgroup=style.plain(group),
        mode="lines+markers" if size else "lines",
        line={"color": look.colour, "width": 2, "dash": dash},
        marker={"color": look.colour, "size": size, "symbol": symbol},
        hovertemplate="%{x}: %{y:.5g}",
    )
    if bars and any(spread):
        array = [value or 0.0 for value in spread]
        thin = {"color": look.colour, "thickness": 1.2, "width": 4}
        trace.error_y = {"type": "data", "array": array, **thin}
    figure.add_trace(trace)


def _add_band(figure: "go.Figure", arm: str, points: Sequence[Point], look: style.Look) -> None:
    import plotly.graph_objects as go

    if any(spread for *_, spread in points):
        edges = [(x, y + (spread or 0.0)) for x, y, spread in points]
        edges += [(x, y - (spread or 0.0)) for x, y, spread in reversed(points)]
        x, y = (list(column) for column in zip(*edges, strict=True))
        fill = {"fill": "toself", "fillcolor": look.colour, "opacity": 0.16, "line": {"width": 0}}
        quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
        figure.add_trace(go.Scatter(x=x, y=y, legendgroup=style.plain(arm), **fill, **quiet))


def _mark_length(figure: "go.Figure", place: float, words: str, *, log: bool) -> None:
    """A dotted line at a length, with words; on a log axis only annotations take its logarithm."""
    edge = {"x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "paper"}
    figure.add_shape(type="line", **edge, line={**_MUTED, "width": 1, "dash": "dot"})
    beside = {"yanchor": "top", "xanchor": "left", "xshift": 5, "showarrow": False}
    font = {**_MUTED, "size": 11.5}
    at = math.log10(place) if log else place
    figure.add_annotation(x=at, y=1, yref="paper", text=words, font=font, **beside)


def _scale_x(figure: "go.Figure", across: str | Sequence[str], places: Iterable[Any]) -> None:
    ticks = list(dict.fromkeys(places))
    if across == "log":
        ticks.sort()
        text = [f"{tick:,}" for tick in ticks]
        named = {"tickvals": ticks, "ticktext": text} if len(ticks) <= TICKS else {}
        figure.update_xaxes(type="log", **named)
    elif across == "layers":
        ticks = sorted({*some_of(sorted(ticks)), *({INPUT} & {*ticks})})
        names = ["in" if place == INPUT else str(place) for place in ticks]
        figure.update_xaxes(tickvals=ticks, ticktext=names)
    elif across:
        figure.update_xaxes(type="category", categoryarray=[*across], categoryorder="array")


def _scale_y(figure: "go.Figure", up: str, name: str, shown: Sequence[float], *, fit: bool) -> None:
    if up == "share":
        figure.update_yaxes(range=[0, 1])
        figure.update_traces(cliponaxis=False)
    elif up == "log" or (up == "auto" and min(shown) > 0 and max(shown) >= 4 * min(shown)):
        low, high = min(shown) / 1.12, max(shown) * 1.12
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 1e4 else (1,)
        ticks = [tick for n in powers for s in steps if low <= (tick := s * 10.0**n) <= high]
        figure.update_yaxes(
            type="log",
            title={"text": f"{name} (log scale)"},
            range=[math.log10(low), math.log10(high)],
            tickvals=ticks,
            ticktext=[f"{tick:,g}" for tick in ticks],
        )
    elif fit:
        low, high = min(shown), max(shown)
        margin = 0.06 * (high - low) or 0.01 * high
        figure.update_yaxes(range=[low - margin, high + margin])
    elif up == "zero" and min(shown) >= 0:
        figure.update_yaxes(rangemode="nonnegative")


def some_of(places: Sequence[int]) -> list[int]:
    """Every n-th of the places, so that an axis can name them."""
    every = math.ceil(len(places) / TICKS)
    return [place for place in places if every == 1 or place % every == 0]


def heads_map(cells: Mapping[tuple[int, int], float], largest: float) -> "go.Figure":
    """Shares in per cent by (layer, head) on one colour scale from 0 to `largest`, with numbers
    where there is room."""

    rows, columns = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    few = len(columns) <= 8 and len(rows) <= TICKS
    figure = new("head", "layer", showlegend=False)
    figure.add_heatmap(
        x=columns,
        y=rows,
        z=[[cells.get((row, column)) for column in columns] for row in rows],
        zmin=0,
        zmax=largest or 1.0,
        colorscale=style.scale(style.SEQUENTIAL),
        showscale=False,
        xgap=2 if few else 1,
        ygap=2 if few else 1,
        texttemplate="%{z:.0f}" if few else "",
        hovertemplate="layer %{y}, head %{x}: %{z:.2f} %<extra></extra>",
    )
    figure.update_xaxes(showgrid=False, tickvals=some_of(columns))
    figure.update_yaxes(showgrid=False, tickvals=some_of(rows), autorange="reversed")
    return figure
