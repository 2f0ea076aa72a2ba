"""Qwen2, with biases of q, k and v alone, and Qwen3, with norms of queries and keys."""

from typing import Any

from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.llama import LlamaLike, windows

# Names of the norms of queries and keys, the same in both libraries, need no entry.


def _settings(ours: ClearheadConfig) -> dict[str, Any]:
    slides = ours.sliding_window is not None
    return {
        "attention_bias": ours.bias,
        "use_sliding_window": slides,
        "sliding_window": ours.sliding_window,
        "max_window_layers": 0 if slides else ours.num_hidden_layers,
        "layer_types": ours.layer_types,
    }


QWEN2 = LlamaLike(
    name="Qwen2",
    model=Qwen2ForCausalLM,
    axes=lambda theirs: {"bias": True, **windows(theirs)},
)
QWEN3 = LlamaLike(
    name="Qwen3",
    model=Qwen3ForCausalLM,
    axes=lambda theirs: {
        "bias": theirs.attention_bias,
        "qk_norm": "rmsnorm",
        **windows(theirs),
    },
    settings=_settings,
)
