"""Llama and the families built like it, whose weights have nearly the same names here.

DiffLlama is differential attention V1 in another order of heads: it pairs head i with head i + H/2,
clearhead pairs neighbours. Its per-head norm has no gain; on export a gain is multiplied into the
output projection, which reads the normed heads.

GraniteSWA has a sink logit for each head, windows, layers without position, and multipliers:
softmax-1 (a logit of 0) and the learned sink are exported to it. Its multipliers are merged into
the weights on import, and are 1 on export.
"""

from typing import Any

import torch
import transformers
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.family import Family, State, positions, rotation, windows
from clearhead.models.layers import FULL, SLIDING

_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _diff_read(state: State, theirs: Any) -> State:
    return _swapped(state, 2, -1, theirs.head_dim)


def _diff_write(state: State, ours: Any) -> State:
    weights = _swapped(state, -1, 2, ours.head_dim)
    for name in state:
        if name.endswith("maps.norm_weight"):
            output = name.replace("maps.norm_weight", "o_proj.weight")
            gain = weights.pop(name)
            weights[output] = (weights[output].unflatten(1, (-1, len(gain))) * gain).flatten(1)
    return weights


def _swapped(state: State, first: int, second: int, head_dim: int) -> State:
    """Heads in another order: (2, −1) pairs i + H/2 with i in place of neighbours; (−1, 2) the
    reverse."""

    def swapped(weight: Tensor) -> Tensor:  # [H · D, C]
        return weight.unflatten(0, (first, second, head_dim)).transpose(0, 1).reshape(weight.shape)

    return {
        name: swapped(weight) if name.endswith(_PROJECTIONS) else weight
        for name, weight in state.items()
    }


DIFFLLAMA = Family(
    model=transformers.DiffLlamaForCausalLM,
    needs={"attention_bias": False, "hidden_act": "silu"},
    axes=lambda theirs: {"maps": "differential", "head_norm": "plain"},
    suits=lambda ours: ours.maps == "differential",
    names={".lambda_": ".maps.lambda_"},
    read=_diff_read,
    write=_diff_write,
    but={"head_norm": ("affine",)},
)


_NORMALIZER = "self_attn.normalizer"
_LOGIT = f"{_NORMALIZER}.logit"


def _granite_axes(theirs: Any) -> dict[str, Any]:
    thetas = set(theirs.layer_rope_theta) - {0}
    if len(thetas) > 1:
        raise ClearheadError(
            f"a GraniteSWA with layer_rope_theta={theirs.layer_rope_theta} has no place in "
            "clearhead: it needs one base for all layers that rotate"
        )
    rope = {"rope_parameters": {**rotation(theirs), "rope_theta": max(thetas, default=0)}}
    return {
        **rope,
        **positions([theta != 0 for theta in theirs.layer_rope_theta]),
        **windows(theirs),
        "normalizer": "sink",
        "bias": theirs.attention_bias or theirs.mlp_bias,
    }


def _granite_settings(ours: Any) -> dict[str, Any]:
    layers = [ours.layer(index) for index in range(ours.num_hidden_layers)]
    theta = (ours.rope_parameters or {}).get("rope_theta", 0)
    return {
        "attention_bias": ours.bias,
        "mlp_bias": ours.bias,
        "attention_multiplier": ours.head_dim**-0.5,
        # It makes a sliding mask even where no layer slides.
        "sliding_window": ours.sliding_window or ours.max_position_embeddings,
        "layer_types": [FULL if layer.sliding_window is None else SLIDING for layer in layers],
        "layer_rope_theta": [theta if layer.position == "rope" else 0 for layer in layers],
    }


def _granite_read(state: State, theirs: Any) -> State:
    """Multipliers into the weights; a head that is the embedding is scaled through its norm."""
    width = state["model.layers.0.self_attn.q_proj.weight"].shape[0] // theirs.num_attention_heads
    query = theirs.attention_multiplier * width**0.5
    branch, inner = theirs.residual_multiplier, theirs.embedding_multiplier
    outer = 1 / theirs.logits_scaling / (inner if theirs.tie_word_embeddings else 1)
    times = {"q_proj": query, "o_proj": branch, "down_proj": branch}
    weights = dict(state)
    for name, weight in state.items():
        factor = times.get(name.split(".")[-2], 1.0)
        if factor != 1:
            weights[name] = weight * factor
    if inner != 1:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in weights and (name[:5] == "model" or theirs.tie_word_embeddings):
                weights[name] = state[name] * inner
    if outer != 1:
        weights["model.norm.weight"] = state["model.norm.weight"] * outer
    return weights


def _granite_write(state: State, ours: ClearheadConfig) -> State:
    weights = dict(state)
    for index in range(ours.num_hidden_layers):
        # Softmax-1 is a sink that rests at 0.
        weight = state["model.norm.weight"]
        name = f"model.layers.{index}.{_LOGIT}"
        logit = weights.get(name, torch.zeros_like(weight[:1]).repeat(ours.num_attention_heads))
        weights[name] = logit + weights.pop(f"model.layers.{index}.{_NORMALIZER}.offset", 0.0)
    return weights


GRANITE_SWA = Family(
    model=transformers.GraniteSWAForCausalLM,
    axes=_granite_axes,
    settings=_granite_settings,
    suits=lambda ours: ours.normalizer in ("softmax1", "sink"),
    names={"self_attn.sinks": _LOGIT},
    read=_granite_read,
    write=_granite_write,
    but={"normalizer": ("softmax1",), "annealed_start": (True,)},
)


def _qwen_settings(ours: ClearheadConfig) -> dict[str, Any]:
    slides = ours.sliding_window is not None
    return {
        "attention_bias": ours.bias,
        "use_sliding_window": slides,
        "sliding_window": ours.sliding_window,
        "max_window_layers": 0 if slides else ours.num_hidden_layers,
        "layer_types": ours.layer_types,
    }


def _qwen_state(state: State, ours: ClearheadConfig) -> State:
    """The weights without those biases of MLPs that are 0, as in what was a Qwen3."""
    unread = {name for name in state if name.endswith(".bias") and ".mlp." in name}
    return {name: each for name, each in state.items() if name not in unread or bool(each.any())}


def _flint_axes(theirs: Any) -> dict[str, Any]:
    return {
        "normalizer": "sink",
        "qk_norm": "rmsnorm",
        "bias": theirs.attention_bias,
        **windows(theirs),
        **positions([kind == SLIDING for kind in theirs.layer_types]),
    }


# Of what no other family suits: Llama says what it lacks.
LLAMA = Family(
    model=transformers.LlamaForCausalLM,
    axes=lambda theirs: {"bias": theirs.attention_bias or theirs.mlp_bias},
    settings=lambda ours: {"attention_bias": ours.bias, "mlp_bias": ours.bias},
    suits=lambda ours: True,
)
# A sliding window in every layer: Mistral's attention reads no layer_types.
MISTRAL = Family(
    model=transformers.MistralForCausalLM,
    axes=lambda theirs: {"sliding_window": theirs.sliding_window},
    settings=lambda ours: {"sliding_window": ours.sliding_window},
    suits=lambda ours: ours.sliding_window is not None,
)
# Biases of q, k and v alone.
QWEN2 = Family(
    model=transformers.Qwen2ForCausalLM, axes=lambda theirs: {"bias": True, **windows(theirs)}
)
# Norms of queries and keys, by the same names in both libraries.
QWEN3 = Family(
    model=transformers.Qwen3ForCausalLM,
    axes=lambda theirs: {"bias": theirs.attention_bias, "qk_norm": "rmsnorm", **windows(theirs)},
    settings=_qwen_settings,
    write=_qwen_state,
    suits=lambda ours: ours.qk_norm == "rmsnorm",
)
# Sinks, norms of queries and keys, position in sliding layers alone. transformers 5.17 has none.
FLINT = Family(
    model=getattr(transformers, "FlintForCausalLM", None),
    axes=_flint_axes,
    names={"self_attn.sinks": "self_attn.normalizer.logit"},
)
FAMILIES = (DIFFLLAMA, GRANITE_SWA, QWEN3, MISTRAL, LLAMA, QWEN2, FLINT)
