"""The name of a key-value cache in transformers: `cache` from 5.24, `past_key_values` before."""

from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("past_key_values", "cache")
_OF_OUTPUTS = {field.name for field in fields(BaseModelOutputWithPast)}
# The keyword of models' calls, and the field of their outputs.
CACHE = next(name for name in reversed(NAMES) if name in _OF_OUTPUTS)


def cache_of(output: Any) -> Any:
    """The cache in a model's output; None where it has none."""
    return getattr(output, CACHE, None)
