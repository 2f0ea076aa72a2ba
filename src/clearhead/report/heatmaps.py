"""Heat-maps: the first token's share by layer and head, and attention maps of several models."""

import base64
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clearhead.records.runs import Measure, Records, Run, ordered_maps
from clearhead.report import style
from clearhead.report.charts import heat_map, new, some_of, with_map
from clearhead.report.page import Panel, Scale

if TYPE_CHECKING:
    import plotly.graph_objects as go

TOKENS = 64  # of an attention map; longer texts are cut
RESOLUTION = 10_000  # weights travel as 16-bit integers in steps of 1/RESOLUTION
SHARE = "first_token_argmax_share"
WEIGHTS = Scale(name="weight", ticks=("0", "0.06", "0.25", "0.56", "1"))
SIGNED = Scale(
    name="signed difference, centred at 0", ticks=("−1", "−0.25", "0", "0.25", "1"), signed=True
)


def largest_share(records: Records) -> float:
    """The largest first-token share of any head: where a colour scale for all models ends."""
    values = (one.value for run in records.runs for one in run.select(SHARE))
    return max((value for value in values if value is not None), default=1.0)


def share_of_queries(run: Run) -> list[Measure]:
    """The share of queries whose largest weight is on the first token: of the difference of maps,
    where a model has one."""
    found = (run.measure(SHARE, map=name) for name in ("difference", "softmax"))
    return [one for one in found if one is not None and one.value is not None][:1]


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
            figure = heat_map(
                cells,
                100 * largest,
                titles=("head", "layer"),
                form=".0f",
                hover="layer %{y}, head %{x}: %{z:.2f} %",
                names=(int, int),
            )
            figure.update_xaxes(tickvals=some_of(sorted({head for _, head in cells})))
            figure.update_yaxes(tickvals=some_of(sorted({layer for layer, _ in cells})))
            title = with_map(arm, name)
            described = f"first token’s share in {title}"
            panels.append(Panel(title=title, figure=figure, shape="cells", described=described))
    return panels


def attention(records: Records) -> list[Panel]:
    """The attention maps of every arm, from its first seed that has any."""
    first = [
        next((run for run in records.of(arm) if run.attention), None) for arm in records.arms()
    ]
    return [
        _attention_panel(run, name)
        for run in first
        if run is not None
        for name in ordered_maps({name for _, _, name in run.attention})
    ]


def _attention_panel(run: Run, name: str) -> Panel:
    """An empty figure, and the maps that the page's script draws into it.

    They stand under "layer.head": weights row by row as base64 of little-endian int16; only j <= i
    of row i where `causal`, else all.
    """
    maps = {key: line for key, line in run.attention.items() if key[2] == name}
    size = min(TOKENS, *(len(line["text"]) for line in maps.values()))
    weights = {
        (layer, head): [[float(one or 0.0) for one in row[:size]] for row in line["weights"][:size]]
        for (layer, head, _), line in sorted(maps.items())
    }
    causal = not any(any(row[i + 1 :]) for rows in weights.values() for i, row in enumerate(rows))
    signed = name == "difference" or any(
        weight < 0 for rows in weights.values() for row in rows for weight in row
    )
    text = next(iter(maps.values()))["text"][:size]
    title = with_map(run.arm, name)
    return Panel(
        title=title,
        described=f"attention map of {title}",
        figure=_attention_figure(signed=signed),
        shape="map",
        attention={
            "signed": signed,
            "causal": causal,
            "tokens": [style.plain(style.token(str(token))) for token in text],
            "maps": {f"{i}.{j}": pack(rows, causal=causal) for (i, j), rows in weights.items()},
            "layers": sorted({layer for layer, _ in weights}),
            "heads": sorted({head for _, head in weights}),
        },
    )


def pack(rows: Sequence[Sequence[float]], *, causal: bool) -> str:
    """Weights as base64 of int16 in steps of 1/RESOLUTION; where `causal`, i + 1 of row i."""
    flat = [weight for i, row in enumerate(rows) for weight in (row[: i + 1] if causal else row)]
    steps = [max(-32768, min(32767, round(weight * RESOLUTION))) for weight in flat]
    return base64.b64encode(struct.pack(f"<{len(steps)}h", *steps)).decode("ascii")


def _attention_figure(*, signed: bool) -> "go.Figure":
    """Colour follows the (signed) square root of the weight, so that small weights stay visible."""
    import plotly.graph_objects as go

    figure = new("token attended to", "token that attends", showlegend=False)
    colours = style.scale(style.DIVERGING if signed else style.SEQUENTIAL)
    ends = {"zmin": -1 if signed else 0, "zmax": 1, "colorscale": colours, "showscale": False}
    figure.add_trace(go.Heatmap(z=[[None]], hoverinfo="text", **ends))
    font = {"size": 9.5, "family": "ui-monospace, monospace"}
    figure.update_xaxes(showgrid=False, tickfont=font, tickangle=-90)
    figure.update_yaxes(showgrid=False, tickfont=font, autorange="reversed")
    return figure
