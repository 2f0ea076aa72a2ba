"""GraniteSWA: Llama with a sink logit a head, windows, layers without position, multipliers.

This is where softmax-1 (a logit of 0) and the learned sink are exported to. Its multipliers are
taken into the weights on the way here, and are 1 on the way there.
"""

from typing import Any

import torch
from transformers import GraniteSWAForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.family import Family, State, positions, rotation, windows
from clearhead.models.layers import FULL, SLIDING

_NORMALIZER = "self_attn.normalizer"
_LOGIT = f"{_NORMALIZER}.logit"


def _axes(theirs: Any) -> dict[str, Any]:
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


def _settings(ours: ClearheadConfig) -> dict[str, Any]:
    assert ours.head_dim is not None
    layers = [ours.layer(index) for index in range(ours.num_hidden_layers)]
    for layer in layers:
        if layer.normalizer not in ("softmax1", "sink"):
            raise ClearheadError(
                f"GraniteSWA has no normalizer={layer.normalizer!r}: only 'softmax1' or 'sink' can "
                "be exported"
            )
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


def _read(state: State, theirs: Any) -> State:
    """Multipliers into the weights; a head that is the embedding is scaled through its norm."""
    width = state["model.layers.0.self_attn.q_proj.weight"].shape[0] // theirs.num_attention_heads
    query = theirs.attention_multiplier * width**0.5
    branch, inner = theirs.residual_multiplier, theirs.embedding_multiplier
    outer = 1 / theirs.logits_scaling / (inner if theirs.tie_word_embeddings else 1)
    times = {"q_proj": query, "o_proj": branch, "down_proj": branch}
    made = dict(state)
    for name, weight in state.items():
        factor = times.get(name.split(".")[-2], 1.0)
        if factor != 1:
            made[name] = weight * factor
    if inner != 1:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in made and (name[:5] == "model" or theirs.tie_word_embeddings):
                made[name] = state[name] * inner
    if outer != 1:
        made["model.norm.weight"] = state["model.norm.weight"] * outer
    return made


def _write(state: State, ours: ClearheadConfig) -> State:
    made = dict(state)
    for index in range(ours.num_hidden_layers):
        # Softmax-1 is a sink that rests at 0.
        weight = state["model.norm.weight"]
        name = f"model.layers.{index}.{_LOGIT}"
        logit = made.get(name, torch.zeros_like(weight[:1]).repeat(ours.num_attention_heads))
        made[name] = logit + made.pop(f"model.layers.{index}.{_NORMALIZER}.offset", 0.0)
    return made


GRANITE_SWA = Family(
    name="GraniteSWA",
    model=GraniteSWAForCausalLM,
    axes=_axes,
    settings=_settings,
    suits=lambda ours: ours.normalizer in ("softmax1", "sink"),
    names={"self_attn.sinks": _LOGIT},
    read=_read,
    write=_write,
    but=("normalizer", "annealed_start"),
)
