"""Traces of a model reading one text: attention maps, and hidden states by token; their packing.

A packed weight w is one of few levels on a √ scale, so that small weights keep their shape:
w ≈ peak · sign(n) · (n / steps)², n the level less `centre`. The bytes of a map are its columns
one below the other (a key's weights change slowly from query to query), then a null key's weights;
under causal attention without the zeros above the diagonal.
"""

import base64
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.diagnose.attention_profile import RowMeans
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import Statistic
from clearhead.probe.tiles import AttentionTile, MapTile

STEPS = 23  # 24 levels of weights that are never negative
SIGNED_STEPS = 15  # 31 levels
SHOWN = {"first_token_argmax_share": "first_token_share"}
SHOWN |= {name: name for name in ("null_mass", "prefix_mass", "entropy", "negative_share")}


class Head(NamedTuple):
    """One head of one layer, both from 0."""

    layer: int
    head: int


class AttentionTrace(RowMeans):
    """Statistics of every head, as in a diagnosis, and the whole maps.

    `negative_share` is beside those of a diagnosis: the part of Σ|weight| that is negative, of
    signed maps. `lambdas` holds a scalar or [heads, T] by layer.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.causal = True
        self.maps: dict[tuple[Head, str], Tensor] = {}  # [T, T]
        self.nulls: dict[tuple[Head, str], Tensor] = {}  # [T]
        self.lambdas: dict[int, Tensor] = {}
        self.names: dict[int, tuple[str, ...]] = {}

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        """Add a tile of one layer's attention to the text, the only one of the batch."""
        super().observe(call, tile)
        start, queries = call.before + tile.start, tile.visible.shape[2]
        rows = slice(start, start + queries)
        self.causal &= not bool(tile.visible[0].triu(rows.start + 1).any())
        self.names[call.layer] = tuple(part.name for part in tile.maps)
        for part in tile.maps:
            if part.entropy is None:
                both = part.weights[0].clamp(max=0.0).neg(), part.weights[0].abs()
                below, whole = (one.sum((-1, -2)) for one in both)
                self.add(call.layer, below, whole, metric="negative_share", map=part.name)
            self._keep(call.layer, part, rows)
        if tile.lambdas is not None:
            own = tile.lambdas.detach().float().cpu()
            self.lambdas[call.layer] = own[0, :, :, 0] if own.ndim > 2 else own.flatten()[0]

    def statistics(self) -> dict[str, dict[str, list[list[float]]]]:
        """Metric → map → rows of heads, a layer each, of all that the page shows; 0 where no query
        counts. Layers without a map are empty."""
        found: dict[str, dict[str, list[list[float]]]] = {}
        for line in self.measures():
            if "head" in line and line["metric"] in SHOWN:
                rows = found.setdefault(SHOWN[line["metric"]], {}).setdefault(line["map"], [])
                rows += [[] for _ in range(line["layer"] + 1 - len(rows))]
                value = line["value"]
                rows[line["layer"]].append(round(value, 5) if value == value else 0.0)
        return found

    def _keep(self, layer: int, part: MapTile, rows: slice) -> None:
        heads, _, keys = part.weights[0].shape
        for index in range(heads):
            place = (Head(layer, index), part.name)
            map_TT = self.maps.setdefault(place, torch.zeros(self.length, self.length))
            map_TT[rows, :keys] = part.weights[0, index].nan_to_num(0.0, 0.0, 0.0).cpu()
            if part.null is not None:
                null_T = self.nulls.setdefault(place, torch.zeros(self.length))
                null_T[rows] = part.null[0, index].nan_to_num(0.0, 0.0, 0.0).cpu()


class HiddenTrace(Statistic):
    """Hidden states before the first layer and after each, token by token.

    Attributes:
        norms: layer → ‖x‖ of each token, [T].
        largest: layer → the largest |x| of each token ÷ the median |x| of the layer, [T].
        channels: layer → where the largest |x| is, [T].
    """

    def __init__(self) -> None:
        self.norms: dict[int, Tensor] = {}
        self.largest: dict[int, Tensor] = {}
        self.channels: dict[int, Tensor] = {}

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add one layer's hidden states of the text, the first of the batch."""
        x = x_BTC[0].float()
        magnitude = x.abs()
        peak, channel = magnitude.max(-1)
        self.norms[layer] = torch.linalg.vector_norm(x, dim=-1).cpu()
        self.largest[layer] = (peak / magnitude.median().clamp_min(1e-30)).cpu()
        self.channels[layer] = channel.cpu()

    def lost(self) -> str:
        """Description of the first number that is not finite; "" if all are."""
        for layer, norms in sorted(self.norms.items()):
            if not norms.isfinite().all():
                return f"after layer {layer}" if layer >= 0 else "before the first layer"
        return ""


def pack(values: np.ndarray) -> str:
    """Little-endian bytes, compressed by zlib, in base64."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def pack_map(weights_TT: Tensor, null_T: Tensor | None, *, causal: bool) -> dict[str, Any]:
    """One map's {"peak", "steps", "centre", "data"}, of finite float32 weights and those of a null
    key, where there is one; `causal` leaves out the entries above the diagonal."""
    signed = bool((weights_TT < 0).any())
    steps, centre = (SIGNED_STEPS, SIGNED_STEPS) if signed else (STEPS, 0)
    columns = weights_TT.T
    part = columns[tuple(torch.triu_indices(*columns.shape))] if causal else columns.flatten()
    weights = torch.cat([part, *([] if null_T is None else [null_T])])
    peak = float(f"{float(weights.abs().max()):.6g}") or 1.0
    levels = (weights.abs() / peak).clamp(max=1.0).sqrt() * weights.sign() * steps
    data = pack((levels.round() + centre).cpu().numpy().astype(np.uint8))
    return {"peak": peak, "steps": steps, "centre": centre, "data": data}
