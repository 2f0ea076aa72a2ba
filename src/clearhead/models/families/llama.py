"""Llama and the families built like it, whose weights have the same names here."""

from typing import Any

import transformers
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.family import Family, State, positions, windows
from clearhead.models.layers import SLIDING


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
    """The weights without biases of MLPs, which are 0 in what was a Qwen3."""
    biases = {name for name in state if name.endswith(".bias") and ".mlp." in name}
    if any(bool(state[name].any()) for name in biases):
        raise ClearheadError("Qwen3 has no bias=True in its MLPs: only biases of 0 can be exported")
    return {name: weight for name, weight in state.items() if name not in biases}


def _flint_axes(theirs: Any) -> dict[str, Any]:
    dense = range(theirs.num_hidden_layers) if not theirs.num_experts else theirs.mlp_only_layers
    if len(set(dense)) < theirs.num_hidden_layers:
        raise ClearheadError(
            f"a Flint with {theirs.num_experts} experts has no place in clearhead: its MLPs are "
            "dense"
        )
    return {
        "normalizer": "sink",
        "qk_norm": "rmsnorm",
        "bias": theirs.attention_bias,
        **windows(theirs),
        **positions([kind == SLIDING for kind in theirs.layer_types]),
    }


# Of what no other family suits: Llama says what it lacks.
LLAMA = Family(
    name="Llama",
    model=LlamaForCausalLM,
    axes=lambda theirs: {"bias": theirs.attention_bias or theirs.mlp_bias},
    settings=lambda ours: {"attention_bias": ours.bias, "mlp_bias": ours.bias},
    suits=lambda ours: True,
)
# A sliding window in every layer: Mistral's attention reads no layer_types.
MISTRAL = Family(
    name="Mistral",
    model=MistralForCausalLM,
    axes=lambda theirs: {"sliding_window": theirs.sliding_window},
    settings=lambda ours: {"sliding_window": ours.sliding_window},
    suits=lambda ours: ours.sliding_window is not None,
)
# Biases of q, k and v alone.
QWEN2 = Family(
    name="Qwen2",
    model=Qwen2ForCausalLM,
    axes=lambda theirs: {"bias": True, **windows(theirs)},
)
# Norms of queries and keys, by the same names in both libraries.
QWEN3 = Family(
    name="Qwen3",
    model=Qwen3ForCausalLM,
    axes=lambda theirs: {
        "bias": theirs.attention_bias,
        "qk_norm": "rmsnorm",
        **windows(theirs),
    },
    settings=_qwen_settings,
    write=_qwen_state,
    suits=lambda ours: ours.qk_norm == "rmsnorm",
)
# Sinks, norms of queries and keys, position in sliding layers alone. transformers 5.17 has none.
FLINT = Family(
    name="Flint",
    model=getattr(transformers, "FlintForCausalLM", None),
    axes=_flint_axes,
    names={"self_attn.sinks": "self_attn.normalizer.logit"},
)
