"""Whole models again, in float64, from the papers' formulas with T × T matrices.

By weights' names and layers' descriptions alone: no line of `clearhead.nn` is shared.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import oracles
from tests.ops.agreement import agree

FUNCTIONS = {"swiglu": F.silu, "geglu": F.gelu, "gelu-exact": F.gelu, "relu": F.relu}
FUNCTIONS["gelu"] = lambda x: F.gelu(x, approximate="tanh")
COCA = {"coca": "exact", "coca-strict": "strict", "coca-slack": "slack"}
THETA = 10_000.0


class Weights:
    """Weights and buffers below a name, as attributes in float64; None for one that is missing."""

    def __init__(self, named: dict[str, Tensor], place: str = "") -> None:
        self.named, self.place = named, place

    def at(self, name: str) -> "Weights":
        return Weights(self.named, f"{self.place}{name}.")

    def __getattr__(self, name: str) -> Any:
        weight = self.named.get(self.place + name)
        return weight if weight is None else weight.double()


def _linear(x: Tensor, w: Weights) -> Tensor:
    """A matrix, eq. 6 of arXiv 2311.01906, or nothing."""
    if w.delta is not None:
        start = torch.eye(x.shape[-1]).double() if w.initial is None else w.initial
        return x @ (w.alpha * start + w.beta * w.delta).T
    x = x if w.weight is None else x @ w.weight.T
    return x if w.bias is None else x + w.bias


def _norm(x: Tensor, w: Weights, eps: float) -> Tensor:
    if w.weight is None:
        return x
    if w.bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w.weight
    return x if w.bias is None else x + w.bias


def _mlp(x: Tensor, w: Weights, layer: Any) -> Tensor:
    wide, function = _linear(x, w.at("up_proj")), FUNCTIONS[layer.mlp]
    if w.at("gate_proj").weight is None:
        wide = function(wide)
    else:
        wide = function(_linear(x, w.at("gate_proj"))) * wide
    if layer.mlp_rotation == "hadamard":
        width = wide.shape[-1]
        wide = oracles.rotate_blocks(wide, width & -width)
    return _linear(wide, w.at("down_proj"))


def _waves(at: Tensor, width: int) -> Tensor:
    channel = torch.arange(width)
    angle = at[..., None] / 10_000.0 ** (channel // 2 * 2 / width).double()
    return torch.where(channel % 2 == 1, angle.cos(), angle.sin())


def _scores(q: Tensor, k: Tensor, delta: Tensor | None, at: Tensor, layer: Any) -> Tensor:
    """Every query with every key, [B, H, T, T]."""
    if layer.scores in COCA:
        scores = oracles.coca_scores(q, k, at, at, THETA, COCA[layer.scores])
    elif layer.scores == "pope":
        scores = oracles.pope_scores(q, k, delta.clamp(-2 * math.pi, 0), at, at, THETA)
    elif layer.position == "xpos":
        scores = oracles.xpos_scores(q, k, at, at, THETA)
    elif layer.position == "rope":
        scores = oracles.rotate(q, at, THETA) @ oracles.rotate(k, at, THETA).mT
    else:
        scores = q @ k.mT
    return scores / layer.head_dim**0.5


def _normalised(scores: Tensor, null: Tensor, seen: Tensor, layer: Any) -> Tensor:
    """Weights on the keys, beside a null key of score `null` and value 0."""
    if layer.normalizer == "softpick":
        term = torch.where(seen, scores.exp() - 1, 0)
        return term.relu() / term.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.cat([null.expand(*scores.shape[:3], 1), scores], -1).softmax(-1)[..., 1:]


def _combined(maps: Tensor, x: Tensor, w: Weights, layer: Any) -> Tensor:
    """Each head's matrix, from its one or two maps."""
    if layer.maps == "single":
        return maps
    first, second = maps[:, 0::2], maps[:, 1::2]
    if layer.maps == "differential-v2":
        lam = torch.sigmoid(_linear(x, w.at("lambda_proj"))).transpose(1, 2)[..., None]
        return first - F.pad(lam, (0, 0, maps.shape[2] - x.shape[1], 0)) * second
    lam = torch.exp(w.lambda_q1 @ w.lambda_k1) - torch.exp(w.lambda_q2 @ w.lambda_k2)
    difference = first - (lam + _lambda_init(layer)) * second
    return difference * (1 - _lambda_init(layer)) if layer.head_norm == "none" else difference


def _lambda_init(layer: Any) -> float:
    start = 0.8 - 0.6 * math.exp(-0.3 * layer.index)
    return start if layer.lambda_init is None else layer.lambda_init


def _attention(
    x: Tensor, w: Weights, layer: Any, at: Tensor, seen: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """A(x), and the matrices that multiply the values, [B, heads, T, T]."""
    length, pairs, normalizer = x.shape[1], layer.maps == "differential", w.at("normalizer")
    widths = dict.fromkeys("qkv", layer.head_dim)
    if layer.scores in COCA:
        halved = "qk" if layer.scores == "coca-strict" else "k"
        widths |= dict.fromkeys(halved, layer.head_dim // 2)
    q, k, v = (
        _linear(x, w.at(f"{name}_proj")).unflatten(-1, (-1, width)).transpose(1, 2)
        for name, width in widths.items()
    )
    q, k = (_norm(y, w.at(name), layer.norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
    if layer.normalizer == "key-value":  # learned keys and values, before the text
        number = normalizer.key_bias.shape[1]
        k, v = (
            torch.cat([own.expand(len(x), -1, -1, -1), y], 2)
            for own, y in ((normalizer.key_bias, k), (normalizer.value_bias, v))
        )
        q, at = F.pad(q, (0, 0, number, 0)), F.pad(at + number, (number, 0))
        at[:, :number] = torch.arange(number)
        seen = F.pad(seen, (number, 0, number, 0), value=True)
    maps = q.shape[1]

    def owner(groups: int) -> list[int]:
        """The key or value of each map; of V1 two neighbours are those of a head."""
        shared = maps // groups
        return [m // 2 // shared * 2 + m % 2 if pairs else m // shared for m in range(maps)]

    key, value = owner(k.shape[1]), owner(v.shape[1])
    delta = w.at("scores").phase_bias
    scores = _scores(q, k[:, key], None if delta is None else delta[key], at, layer)
    heads = maps // (1 if layer.maps == "single" else 2)
    if layer.position == "alibi":
        bias = oracles.alibi_bias(at, at, heads)
        scores = scores + bias.repeat_interleave(maps // heads, 1)
    if layer.position == "forget":
        gates = F.logsigmoid(_linear(x, w.at("decay.gate_proj"))).transpose(1, 2)
        bias = oracles.forget_bias(gates * tokens[:, None], length)
        scores = scores + bias.repeat_interleave(maps // heads, 1)
    rests = layer.normalizer in ("softmax1", "sink", "key")
    resting = torch.zeros(maps, 1, 1).double() if rests else torch.full((maps, 1, 1), -torch.inf)
    if layer.normalizer == "sink":
        resting = normalizer.logit[:, None, None]
    null = resting
    if layer.normalizer == "key":
        null = q @ normalizer.key[key][..., None] / layer.head_dim**0.5
    matrix = _combined(_normalised(scores, null, seen, layer), x, w.at("maps"), layer)
    shaping = w.at("shaping")
    if shaping.alpha is not None:
        alpha, beta = shaping.alpha[:, None, None], shaping.beta[:, None, None]
        matrix = alpha * torch.eye(length).double() + beta * matrix
    if shaping.gamma is not None:
        centre = _combined(_normalised(0 * scores, resting, seen, layer), x, w.at("maps"), layer)
        matrix = matrix - shaping.gamma[:, None, None] * centre
    v = v[:, value]
    if pairs:
        v = torch.cat([v[:, 0::2], v[:, 1::2]], -1)
    elif heads < maps:
        v = v[:, 0::2]
    o, own = (matrix @ v)[:, :, -length:], v[:, :, -length:]
    if pairs and layer.head_norm != "none":
        gain = (1 - _lambda_init(layer)) * (1 if (g := w.at("maps").norm_weight) is None else g)
        o = o / (o.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * gain
    if layer.epilogue == "xsa":
        o = o - (o * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own
    o = o.transpose(1, 2).flatten(2)
    if layer.epilogue.startswith("gate"):
        gates = torch.sigmoid(_linear(x, w.at("epilogue.gate_proj")))
        o = (o.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(2)
    return _linear(o, w.at("o_proj")), matrix[..., -length:, -length:]


def formulas(
    model: Any,
    ids: Tensor,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, V] and each layer's matrices, of causal and of masked models."""
    w, config = Weights(dict(model.named_parameters()) | dict(model.named_buffers())), model.config
    tokens = torch.ones_like(ids) if attention_mask is None else attention_mask
    at = (tokens.cumsum(1) - 1).clamp_min(0)
    if document_ids is not None:
        at = (document_ids[:, :, None] == document_ids[:, None]).tril(-1).sum(-1)
    trunk, matrices = w.at("model"), []
    x = _linear(trunk.at("embed_tokens").weight[ids], trunk.at("project_in"))
    if config.position == "learned":
        x = x + trunk.at("position.weight").weight[at]
    if "sinusoidal" in config.position:
        scale = trunk.at("position").scale
        x = x + _waves(at, x.shape[-1]) * (config.initializer_range if scale is None else scale)
    x = _norm(x, trunk.at("embedding_norm"), config.norm_eps)
    for index in range(config.num_hidden_layers):
        layer, own = config.layer(index), trunk.at(f"layers.{index}")
        causal, masks = config.direction == "causal", {"window": layer.sliding_window}
        masks |= {"key_mask": tokens, "segments": document_ids}
        seen = oracles.visible(ids.shape[1], ids.shape[1], causal=causal, **masks)
        z = _norm(x, own.at("input_layernorm"), layer.norm_eps)
        branch, matrix = _attention(z, own.at("self_attn"), layer, at, seen, tokens)
        matrices.append(matrix)
        gains = [own.at(f"{name}_gain").gain for name in ("attention", "mlp", "mlp_skip")]
        attention, mlp, skip = (1.0 if gain is None else gain for gain in gains)
        y = attention * branch + (x if layer.attention_skip == "identity" else 0)
        if layer.order == "parallel":
            x = y + mlp * _mlp(z, own.at("mlp"), layer)
        else:
            z = _norm(y, own.at("post_attention_layernorm"), layer.norm_eps)
            x = mlp * _mlp(z, own.at("mlp"), layer)
            x = x + (skip * y if layer.mlp_skip == "identity" else 0)
    x = _linear(_norm(x, trunk.at("norm"), config.norm_eps), trunk.at("project_out"))
    head = w.at("lm_head").weight
    return x @ (trunk.at("embed_tokens").weight if head is None else head).T, matrices


def holds(model: Any, ids: Tensor, **inputs: Any) -> None:
    """Assert the formulas' logits, all gradients, and matrices, of the fast and the eager form.

    The model, in float64, is left eager. Angles and λ are float32.
    """
    config = model.config
    exact = config.position in ("none", "learned") and config.maps == "single"
    bound, least = (1e-8, 1e-3) if exact else (1e-4, 1.0)
    shown = inputs.get("attention_mask", torch.ones_like(ids))[..., None]
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        logits, matrices = formulas(model, ids, **inputs)
        got = model(ids, use_cache=False, **inputs).logits
        agree(got, logits, list(model.parameters()), bound=bound, shown=shown, least=least)
    with torch.no_grad():
        out = model(ids, use_cache=False, output_attentions=True, **inputs)
    for got, matrix in zip(out.attentions, matrices, strict=True):
        error = ((got - matrix) * shown[:, None]).abs().max()
        assert error < bound * matrix.abs().max()
