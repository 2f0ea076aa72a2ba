"""A model as the same function in another library's format, and back."""

from typing import Any

from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.diffllama import from_diffllama, to_diffllama
from clearhead.models.llama import from_llama, to_llama


def converted(model: Any) -> Any:
    """A Llama or DiffLlama of transformers as a clearhead model, or such a clearhead model as one.

    Raises:
        ClearheadError: for any other model, and where the other format has no place for this one.
    """
    if isinstance(model, ClearheadForCausalLM):
        pairs = model.config.maps == "differential"
        return to_diffllama(model) if pairs else to_llama(model)
    if isinstance(model, DiffLlamaForCausalLM):
        return from_diffllama(model)
    if isinstance(model, LlamaForCausalLM):
        return from_llama(model)
    raise ClearheadError(
        f"a {type(model).__name__} cannot be converted: give a Llama or a DiffLlama of "
        "transformers, or a clearhead model that is one"
    )
