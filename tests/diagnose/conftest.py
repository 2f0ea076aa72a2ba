"""Tiny models at odd sizes, and their windows, in one fixture."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadForCausalLM, preset

VOCABULARY = 61
LAYERS, HEADS, GROUPS, WIDTH = 3, 4, 2, 24
SPREAD = 0.4  # of the weights, so that attention is far from uniform


def _ours(name: str = "transformer", **overrides: object) -> ClearheadForCausalLM:
    shape = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "initializer_range": SPREAD,
    }
    return ClearheadForCausalLM(preset(name, **{**shape, **overrides})).eval()


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        intermediate_size=40,
        vocab_size=VOCABULARY,
        initializer_range=SPREAD,
    )
    return LlamaForCausalLM(config).eval()


def _gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=32,
        vocab_size=VOCABULARY,
        initializer_range=SPREAD,
    )
    return GPT2LMHeadModel(config).eval()


def _make(name: str) -> torch.nn.Module:
    if name == "Llama":
        return _llama()
    return _gpt2() if name == "GPT-2" else _ours(name)


def _windows(count: int = 5, length: int = 13) -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (count, length)))


def _harmonic(length: int) -> float:
    return sum(1 / (i + 1) for i in range(length)) / length


def _value(lines: list[dict[str, Any]], metric: str, **dimensions: object) -> float:
    """Of the one line with just these dimensions."""
    wanted = {"metric": metric, **dimensions}
    (found,) = (
        line["value"]
        for line in lines
        if {k: v for k, v in line.items() if k not in ("value", "undefined")} == wanted
    )
    return found


class _Calls(list):
    """A statistic that keeps what it is shown."""

    observe = list.append


@pytest.fixture
def tiny() -> SimpleNamespace:
    """`make(name)`, a model of 3 layers with 4 heads; `ours(preset, **overrides)`; `windows(…)`;
    `harmonic(T)`, which is H_T / T; `value(lines, metric, **dimensions)`; `Calls()`, a statistic
    that keeps what it is shown."""
    return SimpleNamespace(
        make=_make,
        ours=_ours,
        windows=_windows,
        harmonic=_harmonic,
        value=_value,
        Calls=_Calls,
    )
