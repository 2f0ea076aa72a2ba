"""Heat-maps: the first token's share by layer and head, and attention maps of several models."""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.figures import Panel, new
from clearhead.report.records import Records, Run, ordered_maps

if TYPE_CHECKING:
    import plotly.graph_objects as go

TOKENS = 64  # of an attention map; longer texts are cut
RESOLUTION = 10_000  # weights travel as 16-bit integers in steps of 1/RESOLUTION
_SHARE = "first_token_argmax_share"


@dataclass(frozen=True, kw_only=True)
class AttentionPanel:
    """The attention maps of one model and kind of map, packed, with an empty figure to fill.

    `maps` holds, under "layer.head", the weights row by row as base64 of little-endian int16: only
    j <= i of row i where `causal`, else all.
    """

    title: str
    signed: bool
    causal: bool
    tokens: tuple[str, ...]
    maps: dict[str, str]
    figure: "go.Figure"


def largest_share(records: Records) -> float:
    """The largest first-token share of any head: where a colour scale for all models ends."""
    return max(
        (
            line["value"]
            for run in records.runs
            for line in run.measures.values()
            if line["metric"] == _SHARE and line["value"] is not None
        ),
        default=1.0,
    )


def first_token_share(records: Records, largest: float) -> list[Panel]:
    """One heat-map (layer × head) an arm and map, on one colour scale from 0 to `largest`.

    Heads of different seeds do not correspond, so the first seed is shown and not a mean.
    """
    panels = []
    for arm in records.arms():
        run = records.of(arm)[0]
        for name in ordered_maps(Records(runs=(run,)).dimension(_SHARE, "map")):
            cells = {
                (line["layer"], line["head"]): 100 * line["value"]
                for line in run.measures.values()
                if line["metric"] == _SHARE
                and line.get("map") == name
                and None not in (line.get("layer"), line.get("head"), line["value"])
            }
            if cells:
                figure = cells_figure(cells, 100 * largest)
                panels.append(Panel(title=_title(arm, name), figure=figure))
    return panels


def _title(arm: str, name: str) -> str:
    return arm if name == "softmax" else f"{arm} · {name}"


def cells_figure(cells: dict[tuple[int, int], float], largest: float) -> "go.Figure":
    import plotly.graph_objects as go

    layers = sorted({layer for layer, _ in cells})
    heads = sorted({head for _, head in cells})
    figure = new("head", "layer", showlegend=False)
    few = len(heads) <= 8 and len(layers) <= 12
    heat = go.Heatmap(
        x=heads,
        y=layers,
        z=[[cells.get((layer, head)) for head in heads] for layer in layers],
        zmin=0,
        zmax=largest or 1.0,
        colorscale=style.scale(style.SEQUENTIAL),
        showscale=False,
        xgap=2,
        ygap=2,
        texttemplate="%{z:.0f}" if few else "",
        hovertemplate="layer %{y}, head %{x}: %{z:.2f} %<extra></extra>",
    )
    figure.add_trace(heat)
    figure.update_xaxes(tickvals=heads, showgrid=False)
    figure.update_yaxes(tickvals=layers, showgrid=False, autorange="reversed")
    return figure


def attention(records: Records) -> list[AttentionPanel]:
    """The attention maps of every arm, from its first seed that has any."""
    panels: list[AttentionPanel] = []
    for arm in records.arms():
        run = next((run for run in records.of(arm) if run.attention), None)
        if run is not None:
            names = ordered_maps({name for _, _, name in run.attention})
            panels.extend(_attention_panel(run, name) for name in names)
    return panels


def _attention_panel(run: Run, name: str) -> AttentionPanel:
    maps = {key: line for key, line in run.attention.items() if key[2] == name}
    size = min(TOKENS, *(len(line["text"]) for line in maps.values()))
    weights = {
        f"{layer}.{head}": [
            [float(weight or 0.0) for weight in row[:size]] for row in line["weights"][:size]
        ]
        for (layer, head, _), line in sorted(maps.items())
    }
    causal = not any(any(row[i + 1 :]) for rows in weights.values() for i, row in enumerate(rows))
    signed = any(weight < 0 for rows in weights.values() for row in rows for weight in row)
    text = next(iter(maps.values()))["text"][:size]
    return AttentionPanel(
        title=_title(run.arm, name),
        signed=signed or name == "difference",
        causal=causal,
        tokens=tuple(style.plain(style.token(str(token))) for token in text),
        maps={key: pack(rows, causal=causal) for key, rows in weights.items()},
        figure=_attention_figure(signed=signed or name == "difference"),
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
    heat = go.Heatmap(
        z=[[None]],
        zmin=-1 if signed else 0,
        zmax=1,
        colorscale=style.scale(style.DIVERGING if signed else style.SEQUENTIAL),
        showscale=False,
        hoverinfo="text",
    )
    figure.add_trace(heat)
    axis: dict[str, Any] = {
        "showgrid": False,
        "tickfont": {"size": 9.5, "family": "ui-monospace, monospace"},
    }
    figure.update_xaxes(**axis, tickangle=-90)
    figure.update_yaxes(**axis, autorange="reversed")
    return figure
