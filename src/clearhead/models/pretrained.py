"""The base class of clearhead's models: what transformers needs to know of them."""

from dataclasses import fields
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from clearhead.models.configuration import ClearheadConfig
from clearhead.nn import initialise

# The keyword of a key-value cache in calls and outputs: `cache` from transformers 5.24 on.
CACHE = "past_key_values"
if any(field.name == "cache" for field in fields(BaseModelOutputWithPast)):
    CACHE = "cache"


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output; None where it has none, as of recurrent models."""
    cache = getattr(output, CACHE, None)
    layers = getattr(cache, "layers", ())
    return None if layers and not any(hasattr(layer, "keys") for layer in layers) else cache


class ClearheadPreTrainedModel(PreTrainedModel):
    config_class = ClearheadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ClearheadLayer"]  # noqa: RUF012 (transformers' own form)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    # Kept False, transformers' default: flash_attn and flex_attn (sinks, λ are
    # unknown to them), attention_backend (a backend's function would ignore those).
    _can_compile_fullgraph = True
    _supports_context_parallel = False  # it would shard the text below attention, unseen

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        config.settle()  # it may have been changed since it was made
        for key in unknown:  # of from_pretrained, where no configuration took it
            config.refuse(key)
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """As the configuration's."""
        if not cls.__module__.startswith("clearhead."):
            super().register_for_auto_class(auto_class)

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config.initializer_range)
