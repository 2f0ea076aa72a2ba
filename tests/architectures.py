"""Tiny random models of transformers' architectures, and of clearhead's own."""

from typing import Any

import transformers
from torch import nn

from clearhead import ClearheadForCausalLM, preset

VOCABULARY, LENGTH = 61, 32  # entries; tokens that every one of them can read
SPREAD = 0.4  # of the weights, so that attention is far from uniform
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": LENGTH,
    "initializer_range": SPREAD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 6}
# Name -> transformers' prefix of the classes, and what its configuration has beside SHAPE.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", GROUPED),
    "Mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "Qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3", GROUPED),
    "Gemma2": ("Gemma2", GROUPED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 6}),
    "Phi": ("Phi", {"hidden_size": 32}),  # half of a head is rotated
    "GPT-NeoX": ("GPTNeoX", {"hidden_size": 32}),  # a quarter
    "OPT": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 24}),
    "DiffLlama": ("DiffLlama", {"num_key_value_heads": 2}),
    "gpt-oss": (
        "GptOss",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "GPT-2": ("GPT2", {}),
    "Bloom": ("Bloom", {}),
}
OURS = ("transformer", "gpt2", "softmax1", "sink", "differential", "differential-v2")
# These compute attention themselves, so nothing can take its place.
WITHOUT_INTERFACE = ("Bloom",)


def make(name: str) -> nn.Module:
    """The model in evaluation mode, from the current seed."""
    if name in OURS:
        ids = {key: value for key, value in SHAPE.items() if not key.endswith("_token_id")}
        return ClearheadForCausalLM(preset(name, **ids)).eval()
    prefix, extra = OTHERS[name]
    config = getattr(transformers, f"{prefix}Config")(**SHAPE | extra)
    kind = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{prefix}{kind}")(config).eval()
