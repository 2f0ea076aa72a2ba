"""Models of transformers as llama.cpp reads them: its converter to GGUF takes the folder."""

from copy import deepcopy
from typing import Any

from transformers import GraniteSWAForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.families.family import filled
from clearhead.models.layers import SLIDING

# A window that no text reaches. llama.cpp multiplies it in 32 bits, by up to 256 texts at once.
_BEYOND = 2**20  # tokens
_YARN = ("factor", "original_max_position_embeddings")
# What the converter reads of each kind of scaled positions; of others it warns, and rotates anew.
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_YARN, "low_freq_factor", "high_freq_factor"),
    "yarn": _YARN,
}


def readable(model: Any) -> Any:
    """The same function as llama.cpp's converter and its runtime read it.

    A Llama or Qwen3 is read as it is. A GraniteSWA needs two things more: at least one layer with
    a window, without which the runtime aborts, and `no_rope_layers`, the converter's name of layers
    without position, without which it gives them one. Seen in the llama.cpp of llama-cpp-python
    0.3.36.

    Raises:
        ClearheadError: for what llama.cpp has no family for, or would read as another function.
    """
    if reason := _otherwise(model):
        raise ClearheadError(f"llama.cpp {reason}: transformers reads that of --for serving")
    if not isinstance(model, GraniteSWAForCausalLM):
        return model
    config = deepcopy(model.config)
    if SLIDING not in config.layer_types:
        config.layer_types[-1] = SLIDING
        config.sliding_window = max(_BEYOND, config.max_position_embeddings)
    config.no_rope_layers = [int(theta != 0) for theta in config.layer_rope_theta]
    return filled(type(model), config, model.state_dict(), model)


def _otherwise(model: Any) -> str | None:
    """Reason why llama.cpp cannot read a model, or reads it as another function; or None."""
    kind, config = type(model).__name__.removesuffix("ForCausalLM"), model.config
    rope = {key for key, value in (config.rope_parameters or {}).items() if value is not None}
    scaling = (config.rope_parameters or {}).get("rope_type", "default")
    unread = sorted(rope - {"rope_type", "rope_theta", *_ROPE.get(scaling, ())})
    if scaling not in _ROPE:
        return f"has no rope_type={scaling!r}"
    if unread:
        return f"reads rope_type={scaling!r} without its {', '.join(unread)}"
    if isinstance(model, GraniteSWAForCausalLM):
        width = model.model.layers[0].self_attn.head_dim
        whole = config.hidden_size == config.num_attention_heads * width
        return None if whole else f"reads a {kind} without its head_dim={width}"
    if getattr(config, "sliding_window", None) is not None:
        return f"reads a {kind} without its window of {config.sliding_window} tokens"
    if isinstance(model, Qwen3ForCausalLM) and config.attention_bias:
        return f"reads a {kind} without the biases of its output projections"
    return None if isinstance(model, LlamaForCausalLM | Qwen3ForCausalLM) else f"has no {kind}"
