"""A model as the same function in another library's format, and back."""

from typing import Any

import torch
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.diffllama import from_diffllama, to_diffllama
from clearhead.models.llama import from_llama, to_llama

_TOKENS = 64  # that both read, to be compared


def converted(model: Any) -> Any:
    """A Llama or DiffLlama of transformers as a clearhead model, or such a clearhead model as one.

    Raises:
        ClearheadError: for any other model, where the other format has no place for this one, and
            where both give other logits.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ClearheadError("the model is quantised: convert the one that it was made from")
    made = _convert(model)
    difference = _difference(model, made)
    if not difference <= _tolerance(model.dtype):  # nor where it is no number
        raise ClearheadError(
            f"the converted {type(model).__name__} gives other logits, by {difference:.2g} of "
            "their size: please report this model"
        )
    return made


def _convert(model: Any) -> Any:
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


def _difference(model: Any, made: Any) -> float:
    """The Euclidean distance of two models' logits, over the length of the first's."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, _TOKENS), generator=draw).to(model.device)
    with torch.no_grad():
        one, other = (each(input_ids=ids).logits.double() for each in (model.eval(), made))
    return float((one - other).norm() / one.norm())


def _tolerance(dtype: torch.dtype) -> float:
    """What another order of sums may change, and no more."""
    return 1e-4 if dtype.itemsize >= 4 else 0.05
