"""Traces of a model reading one text: attention maps, hidden states and predictions by token.

A packed weight w is one of few levels on a √ scale, so that small weights keep their shape:
w ≈ peak · sign(n) · (n / steps)², n the level less `centre`. The bytes of a map are its columns
one below the other (a key's weights change slowly from query to query), then a null key's weights;
under causal attention without the zeros above the diagonal.
"""

import base64
import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.diagnose.attention_profile import RowMeans
from clearhead.models.inspection import decoder_layers
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import Statistic
from clearhead.probe.tiles import AttentionTile

STEPS = 23  # 24 levels of weights that are never negative
SIGNED_STEPS = 15  # 31 levels
SHOWN = {"first_token_argmax_share": "first_token_share"}
SHOWN |= {name: name for name in ("null_mass", "prefix_mass", "entropy", "negative_share")}
BEST = 4  # predictions shown of each token and layer
_CLOSE = 0.02  # of a probability: a lens further off is not this model's


class AttentionTrace(RowMeans):
    """Statistics of every head, as in a diagnosis, and the whole maps.

    `negative_share` is beside those of a diagnosis: the part of Σ|weight| that is negative, of
    signed maps.

    Attributes:
        maps: (layer, head, map) → weights [T, T], finite.
        nulls: of the same places, weights of a null key [T].
        lambdas: a scalar or [heads, T] by layer.
        names: of the maps by layer.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.causal = length, True
        self.maps: dict[tuple[int, int, str], Tensor] = {}
        self.nulls: dict[tuple[int, int, str], Tensor] = {}
        self.lambdas: dict[int, Tensor] = {}
        self.names: dict[int, tuple[str, ...]] = {}

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        """Add a tile of one layer's attention to the text, the only one of the batch."""
        super().observe(call, tile)
        start, layer = call.before + tile.start, call.layer
        rows = slice(start, start + tile.visible.shape[2])
        self.causal &= not bool(tile.visible[0].triu(start + 1).any())
        self.names[layer] = tuple(part.name for part in tile.maps)
        for part in tile.maps:
            if part.entropy is None:
                both = part.weights[0].clamp(max=0.0).neg(), part.weights[0].abs()
                below, whole = (one.sum((-1, -2)) for one in both)
                self.add(layer, below, whole, metric="negative_share", map=part.name)
            for head, weights_TS in enumerate(part.weights[0]):
                place = layer, head, part.name
                map_TT = self.maps.setdefault(place, torch.zeros(self.length, self.length))
                map_TT[rows, : weights_TS.shape[-1]] = weights_TS.nan_to_num(0.0, 0.0, 0.0).cpu()
                if part.null is not None:
                    null_T = self.nulls.setdefault(place, torch.zeros(self.length))
                    null_T[rows] = part.null[0, head].nan_to_num(0.0, 0.0, 0.0).cpu()
        if tile.lambdas is not None:
            own = tile.lambdas.detach().float().cpu()
            self.lambdas[layer] = own[0, :, :, 0] if own.ndim > 2 else own.flatten()[0]

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


class Lens(Statistic):
    """The logit lens: a causal language model's prediction of the next token after each layer.

    The model's own final norm and output head are applied to the hidden states of every layer
    (nostalgebraist, 2020). The norm is the module of the backbone whose input is the last layer's
    output. A model may do more to its logits: see `agrees`.

    Attributes:
        norm: the model's own, identity if it has none.
        head: the model's own.
        tokens: layer → [T, BEST], the likeliest next tokens.
        shares: layer → [T, BEST], their probabilities.
    """

    def __init__(self, model: Any, ids_BT: Tensor) -> None:
        self.head = model.get_output_embeddings()
        self.tokens: dict[int, Tensor] = {}
        self.shares: dict[int, Tensor] = {}
        last = decoder_layers(model)[-1]
        output: list[Tensor] = []
        norms: list[Any] = []

        def watch(module: nn.Module, arguments: Any, result: Any) -> None:
            if module is last:
                output.append(result[0] if isinstance(result, tuple) else result)
            # A pooler has the same input, but returns one vector.
            elif output and arguments and arguments[0] is output[-1] and isinstance(result, Tensor):
                norms.extend([module] * (result.shape == output[-1].shape))

        others = {*model.base_model.modules()} - {*last.modules()}
        handles = [module.register_forward_hook(watch) for module in (last, *others)]
        try:
            model(input_ids=ids_BT)
        finally:
            for handle in handles:
                handle.remove()
        self.norm = norms[0] if norms else nn.Identity()

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the predictions after one layer, of the first text of the batch."""
        # A stream in float32 has a head of the weights' dtype (Mamba in bfloat16).
        weight = getattr(self.head, "weight", None)
        normed = self.norm(x_BTC[0])
        logits_TV = self.head(normed if weight is None else normed.to(weight.dtype))
        self.shares[layer], self.tokens[layer] = _best(logits_TV)

    def agrees(self, logits_TV: Tensor) -> bool:
        """True if its prediction after the last layer is the model's own."""
        shares, _ = _best(logits_TV)
        return bool(((shares - self.shares[max(self.shares)]).abs() < _CLOSE).all())


def _best(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The BEST largest probabilities of each row, and their tokens."""
    logits = logits_TV.float()
    top = logits.topk(BEST)
    return torch.exp(top.values - logits.logsumexp(-1, keepdim=True)).cpu(), top.indices.cpu()


def surprises(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """−log₂ p of each token after those before it, [T − 1]."""
    nats = nn.functional.cross_entropy(logits_TV[:-1].float(), ids_T[1:], reduction="none")
    return nats.cpu() / torch.tensor(math.log(2.0))


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
