"""Tiny models, randomly initialised, of the architectures that people bring."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from clearhead import ClearheadForCausalLM, preset
from clearhead.models import ClearheadModel

VOCABULARY, LONGEST = 61, 64
_SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}


def _ours(name: str, kind: Any = ClearheadForCausalLM, **changes: Any) -> Any:
    keys = {key: value for key, value in _SHAPE.items() if not key.endswith("token_id")}
    return kind(preset(name, **{**keys, **changes}))


ROTARY: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_SHAPE)),
    "diffllama": lambda: hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**_GROUPED)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_GROUPED, head_dim=6, num_local_experts=2, num_experts_per_tok=1)
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=20)),
    "gemma-3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_GROUPED, head_dim=6, sliding_window=20)
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**_GROUPED)),  # neighbours are turned
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**{**_SHAPE, "pad_token_id": 0})
    ),
    "clearhead": lambda: _ours("transformer", num_key_value_heads=2),
    "clearhead differential": lambda: _ours("differential"),
    "clearhead softmax1": lambda: _ours("softmax1"),
    "clearhead coca": lambda: _ours("coca"),
    "clearhead encoder": lambda: _ours("transformer", ClearheadModel, direction="bidirectional"),
}
UNTURNED: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=24,
            n_layer=3,
            n_head=4,
            n_positions=LONGEST,
            vocab_size=VOCABULARY,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=40,
            vocab_size=VOCABULARY,
            max_position_embeddings=LONGEST,
            word_embed_proj_dim=24,
            init_std=0.4,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**{**_SHAPE, "pad_token_id": 0})),
    "clearhead alibi": lambda: _ours("alibi"),
    "clearhead coca-slack": lambda: _ours("coca-slack"),
}
UNOBSERVED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(hidden_size=24, n_layer=3, n_head=4, vocab_size=VOCABULARY)
    ),
    "mpt": lambda: hf.MptForCausalLM(
        hf.MptConfig(d_model=24, n_layers=3, n_heads=4, vocab_size=VOCABULARY, expansion_ratio=2)
    ),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(hidden_size=24, num_hidden_layers=3, vocab_size=VOCABULARY, state_size=4)
    ),
}
ENCODERS = ("modernbert", "clearhead encoder", "bert")


def make(name: str) -> Any:
    """The model, in evaluation mode."""
    torch.manual_seed(0)
    return {**ROTARY, **UNTURNED, **UNOBSERVED}[name]().eval()
