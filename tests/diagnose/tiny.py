"""Tiny models at odd sizes, and their windows."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadForCausalLM, preset

VOCABULARY = 61
LAYERS, HEADS, WIDTH = 3, 4, 24


def ours(name: str = "transformer", **overrides: object) -> ClearheadForCausalLM:
    """One of clearhead's presets, its attention far from uniform."""
    shape = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
    }
    return ClearheadForCausalLM(preset(name, **{**shape, **overrides})).eval()


def llama(implementation: str = "sdpa", **overrides: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=40,
        vocab_size=VOCABULARY,
        initializer_range=0.4,
        attn_implementation=implementation,
        **overrides,
    )
    return LlamaForCausalLM(config).eval()


def gpt2(implementation: str = "sdpa") -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=32,
        vocab_size=VOCABULARY,
        initializer_range=0.4,
        attn_implementation=implementation,
    )
    return GPT2LMHeadModel(config).eval()


def windows(count: int = 5, length: int = 13) -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (count, length)))


def harmonic(length: int) -> float:
    """H_T / T."""
    return sum(1 / (i + 1) for i in range(length)) / length
