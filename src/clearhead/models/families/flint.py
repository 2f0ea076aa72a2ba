"""Flint without experts: sinks, norms of queries and keys, position in sliding layers alone."""

from typing import Any

from transformers import FlintForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.families.llama import LlamaLike, positions, windows
from clearhead.models.layers import SLIDING


def _axes(theirs: Any) -> dict[str, Any]:
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


FLINT = LlamaLike(
    name="Flint",
    model=FlintForCausalLM,
    axes=_axes,
    names={"self_attn.sinks": "self_attn.normalizer.logit"},
)
