"""Figures as plotly objects: curves over training, over length and over layers.

Every figure is built in the colours of a light page; `style.LIGHT_TO_DARK` translates them. Text
from records passes through `style.plain`, and never enters a hover template.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from clearhead.report import style
from clearhead.report.records import Records, Run
from clearhead.report.statistics import summarize

if TYPE_CHECKING:
    import plotly.graph_objects as go

POINTS = 80  # of a training curve; each is the mean over a block of steps
Looks = dict[str, style.Look]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure under a heading of its own; `note` says what the reader could not see from it.

    Attributes:
        own_legend: its lines are not the page's arms or models, whose key does not tell them apart.
    """

    title: str
    figure: "go.Figure"
    note: str = ""
    own_legend: bool = False


def new(x: str, y: str, **layout: Any) -> "go.Figure":
    """An empty figure with axes named `x` and `y` in the style of the house."""
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
        _curve(figure, arm, [(x / divisor, *rest) for x, *rest in curve], looks[arm])
    smoothing = "none" if width == 1 else f"each point is the mean over {width} steps"
    start = _crop_start(figure, [[y for _, y, _ in curve] for curve in curves.values()])
    title = "by tokens read" if against == "tokens" else "by time on this machine"
    left_out = f" Runs on other devices, left out: {others}." if others else ""
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
        summary = summarize(ys)
        assert summary is not None
        curve.append((fmean(xs), summary.mean, summary.deviation or 0.0))
    return curve


def _curve(figure: "go.Figure", arm: str, curve: list[Any], look: style.Look) -> None:
    import plotly.graph_objects as go

    if not curve:
        return
    x, y, deviation = (list(column) for column in zip(*curve, strict=True))
    if any(deviation):
        upper = [mean + spread for mean, spread in zip(y, deviation, strict=True)]
        lower = [mean - spread for mean, spread in zip(y, deviation, strict=True)]
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
    line = go.Scatter(
        x=x,
        y=y,
        name=style.plain(arm),
        legendgroup=style.plain(arm),
        mode="lines",
        line={"color": look.colour, "width": 2},
        hovertemplate="%{x:.4g}: %{y:.4f}",
    )
    figure.add_trace(line)


def perplexity_by_length(records: Records, looks: Looks) -> Panel | None:
    """Validation perplexity against the length of the text; the training length is marked."""
    lengths = records.dimension("perplexity", "length")
    if not lengths:
        return None
    figure = new("length of the text (tokens, log scale)", "validation perplexity")
    missing: dict[str, list[str]] = {}
    shown: list[float] = []
    for arm in records.arms():
        points = []
        for length in lengths:
            summary = records.summary(arm, "perplexity", length=length)
            if summary is not None:
                points.append((length, summary.mean, summary.deviation))
                continue
            reason = records.reason(arm, "perplexity", length=length)
            if reason:
                missing.setdefault(f"at {length:,} tokens: {reason}.", []).append(arm)
        shown.extend(mean for _, mean, _ in points)
        line(figure, arm, points, looks[arm])
    figure.update_xaxes(
        type="log", tickvals=lengths, ticktext=[f"{length:,}" for length in lengths]
    )
    scale_axis(figure, "validation perplexity", shown)
    trained = records.sequence_length()
    if trained:
        # On a log axis shapes take the value itself, annotations its logarithm.
        mark_length(figure, trained, "trained at this length", at=math.log10(trained))
    note = "Bars: ± 1 standard deviation over seeds. " if _has_bars(figure) else ""
    reasons = [f"{', '.join(arms)} {reason}" for reason, arms in missing.items()]
    return Panel(
        title="Perplexity by length of text", figure=figure, note=(note + " ".join(reasons)).strip()
    )


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


def line(
    figure: "go.Figure",
    arm: str,
    points: Sequence[tuple[float, float, float | None]],
    look: style.Look,
    *,
    name: str = "",
    dash: str = "solid",
    size: int = 8,
) -> None:
    """Add an arm's line through (x, y, spread or None); `name` and `dash` tell a second one apart,
    which the legend leaves out."""
    import plotly.graph_objects as go

    if not points:
        return
    x, y, deviation = (list(column) for column in zip(*points, strict=True))
    trace = go.Scatter(
        x=x,
        y=y,
        name=style.plain(arm + name),
        legendgroup=style.plain(arm),
        showlegend=not name,
        mode="lines+markers",
        line={"color": look.colour, "width": 2, "dash": dash},
        marker={
            "color": look.colour,
            "size": size,
            "symbol": look.symbol if dash == "solid" else f"{look.symbol}-open",
        },
        hovertemplate="%{x}: %{y:.5g}",
    )
    if any(deviation):
        trace.error_y = {
            "type": "data",
            "array": [value or 0.0 for value in deviation],
            "color": look.colour,
            "thickness": 1.2,
            "width": 4,
        }
    figure.add_trace(trace)


def scale_axis(figure: "go.Figure", name: str, shown: Sequence[float]) -> None:
    """A logarithmic y axis where `shown` spans more than a factor of four, and one that says so."""
    if not shown or min(shown) <= 0 or max(shown) < 4 * min(shown):
        return
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


def _has_bars(figure: "go.Figure") -> bool:
    return any(trace.error_y.array is not None for trace in figure.data)


def by_layer(
    records: Records,
    looks: Looks,
    metric: Literal["kurtosis", "kurtosis_rotated", "largest_activation"],
) -> Panel | None:
    """Kurtosis or largest activation of the hidden states by layer, first token and rest apart."""
    layers = records.dimension(metric, "layer")
    if not layers:
        return None
    title, axis = {
        "kurtosis": ("Kurtosis by layer", "kurtosis (3 = Gaussian)"),
        "kurtosis_rotated": (
            "Kurtosis by layer in OrthoAdam’s basis",
            "kurtosis, rotated (3 = Gaussian)",
        ),
        "largest_activation": ("Largest activation by layer", "largest |activation|"),
    }[metric]
    figure = new("layer", axis)
    figure.update_xaxes(tickvals=layers)
    shown: list[float] = []
    for arm in records.arms():
        for tokens, name, dash in (
            ("first", "", "solid"),
            ("rest", ", other tokens", "dot"),
        ):
            points = []
            for layer in layers:
                summary = records.summary(arm, metric, layer=layer, tokens=tokens)
                if summary is not None and summary.mean > 0:
                    points.append((layer, summary.mean, summary.deviation))
            shown.extend(mean for _, mean, _ in points)
            line(figure, arm, points, looks[arm], name=name, dash=dash)
    if not shown:
        return None
    scale_axis(figure, axis, shown)
    note = "Solid: the first token; dotted: all other tokens."
    if _has_bars(figure):
        note += " Bars: ± 1 standard deviation over seeds."
    return Panel(title=title, figure=figure, note=note)
