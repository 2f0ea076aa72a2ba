"""Tiny random models of transformers' architectures, and of clearhead's own."""

import importlib.util
from importlib.metadata import version
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models import ClearheadModel

VOCABULARY, LENGTH = 61, 32  # entries; tokens that every one of them can read
SPREAD = 0.4  # of the weights, so that attention is far from uniform
SHAPE: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "intermediate_size": 40}
SHAPE |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SHAPE |= {"initializer_range": SPREAD}
GROUPED = {"num_key_value_heads": 2, "head_dim": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# transformers 5.17 takes sdpa, which leaves the cap out; later versions take eager.
CAPPED = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 6, "attn_implementation": "eager"}
PADDED = {"pad_token_id": 0}  # what cannot do without
# Name -> transformers' class, and what its configuration has beside SHAPE.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "Qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED),
    "Gemma2": ("Gemma2ForCausalLM", GROUPED | CAPPED),
    "Gemma3": ("Gemma3ForCausalLM", GROUPED | {"sliding_window": 5}),
    "Cohere": ("CohereForCausalLM", {"num_key_value_heads": 2}),  # neighbours are turned
    "Phi": ("PhiForCausalLM", {"hidden_size": 32}),  # half of a head is rotated
    "GPT-NeoX": ("GPTNeoXForCausalLM", {"hidden_size": 32}),  # a quarter
    "OPT": ("OPTForCausalLM", {"ffn_dim": 40, "word_embed_proj_dim": 24, "init_std": SPREAD}),
    "DiffLlama": ("DiffLlamaForCausalLM", {"num_key_value_heads": 2}),
    "gpt-oss": ("GptOssForCausalLM", GROUPED | EXPERTS | {"sliding_window": 5}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "Bloom": ("BloomForCausalLM", {}),
    "MPT": ("MptForCausalLM", {"expansion_ratio": 2}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ModernBERT": ("ModernBertForMaskedLM", PADDED),
    "BERT": ("BertForMaskedLM", PADDED),
    "RoBERTa": ("RobertaForMaskedLM", {"pad_token_id": 1}),  # positions begin after it
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {"Mamba": ("MambaForCausalLM", {})}
OURS = ("transformer", "gpt2", "softmax1", "sink", "differential", "differential-v2")
OUR_ENCODER = "transformer, bidirectional"
# These compute attention themselves, so nothing can take its place.
WITHOUT_INTERFACE = ("Bloom", "MPT")


def make(name: str, **changes: Any) -> Any:
    """The model in evaluation mode, from the current seed; `changes` of its configuration."""
    known = OTHERS | ENCODERS | RECURRENT
    if name in known:
        kind, extra = known[name]
        made: nn.Module = _made(getattr(transformers, kind), SHAPE | extra | changes)
    else:
        ids = {key: value for key, value in SHAPE.items() if not key.endswith("_token_id")}
        if name == OUR_ENCODER:
            encoder = ids | {"direction": "bidirectional"} | changes
            made = ClearheadModel(preset("transformer", **encoder))
        else:
            config = preset(name, **ids | changes)
            causal = config.direction == "causal"
            made = (ClearheadForCausalLM if causal else ClearheadForMaskedLM)(config)
    return made.eval()


def _made(kind: Any, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = kind(kind.config_class(**options))
    return model


def takes_adapters() -> bool:
    """True where PEFT is installed, of a version to which transformers adds adapters."""
    if importlib.util.find_spec("peft") is None:
        return False
    wanted = importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION
    return Version(version("peft")) >= Version(wanted)
