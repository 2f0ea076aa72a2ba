"""Models of transformers as llama.cpp reads them: its converter to GGUF takes the folder."""

from copy import deepcopy
from typing import Any

from transformers import GraniteSWAForCausalLM, LlamaForCausalLM, MistralForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.families.family import filled
from clearhead.models.layers import SLIDING

# A window that no text reaches. llama.cpp multiplies it in 32 bits, by up to 256 texts at once.
BEYOND = 2**20  # tokens


def readable(model: Any) -> Any:
    """The same function as llama.cpp's converter and its runtime read it.

    A Llama, Mistral or Qwen3 is read as it is. A GraniteSWA needs two things more: at least one
    layer with a window, without which the runtime aborts, and `no_rope_layers`, the converter's
    name of layers without position, without which it gives them one. Seen in the llama.cpp of
    llama-cpp-python 0.3.36.

    Raises:
        ClearheadError: for DiffLlama, and for a window of another family, which llama.cpp ignores.
    """
    if isinstance(model, GraniteSWAForCausalLM):
        return _granite(model)
    kind, config = type(model).__name__, model.config
    if not isinstance(model, LlamaForCausalLM | MistralForCausalLM) and kind[:5] != "Qwen3":
        raise ClearheadError(f"llama.cpp has no {kind}: transformers reads that of --for serving")
    if getattr(config, "sliding_window", None) is not None:
        raise ClearheadError(
            f"llama.cpp reads a {kind} without its window of {config.sliding_window} tokens, which "
            "is another function: vLLM and transformers read that of --for serving"
        )
    return model


def _granite(model: Any) -> Any:
    config = deepcopy(model.config)
    if SLIDING not in config.layer_types:
        config.layer_types[-1] = SLIDING
        config.sliding_window = max(BEYOND, config.max_position_embeddings)
    config.no_rope_layers = [int(theta != 0) for theta in config.layer_rope_theta]
    return filled(type(model), config, model.state_dict(), model)
