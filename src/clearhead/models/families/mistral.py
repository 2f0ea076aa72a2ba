"""Mistral: Llama with a sliding window in every layer."""

from transformers import MistralForCausalLM

from clearhead.models.families.llama import LlamaLike, windows

MISTRAL = LlamaLike(
    name="Mistral",
    model=MistralForCausalLM,
    axes=windows,
    settings=lambda ours: {"sliding_window": ours.sliding_window},
)
