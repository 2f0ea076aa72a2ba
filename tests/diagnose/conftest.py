"""Tiny models by what diagnose can see in them, their windows, and statistics of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import tests_architectures as architectures
import torch
from torch import Tensor, nn

from clearhead.ops.visibility import Visibility
from clearhead.probe.attention_call import AttentionCall

VOCABULARY, LONGEST = architectures.VOCABULARY, 64
# No rotary positions, no plain ones, or in a layout that `clearhead convert` does not keep.
UNTURNED = (
    *("GPT-2", "OPT", "BERT", "RoBERTa", "alibi", "coca-slack"),
    *("Gemma2", "Gemma3", "Cohere", "Phi", "GPT-NeoX", "gpt-oss", "ModernBERT"),
)
UNOBSERVED = (*architectures.WITHOUT_INTERFACE, *architectures.RECURRENT)
ENCODERS = ("ModernBERT", architectures.OUR_ENCODER, "BERT", "RoBERTa")
ROTARY = tuple(
    name
    for name in (*architectures.OTHERS, *architectures.OURS, "coca", *ENCODERS)
    if name not in (*UNTURNED, *UNOBSERVED, "gpt2")
)


def make(name: str) -> Any:
    """The model, of three layers and 64 positions; a window sees 20 tokens where there is one."""
    _, extra = architectures.OTHERS.get(name, ("", {}))
    changes = {"sliding_window": 20} if "sliding_window" in extra else {}
    shape = {"num_hidden_layers": 3, "max_position_embeddings": LONGEST}
    return architectures.make(name, **shape, **changes)


def _make(name: str = "transformer", **overrides: object) -> Any:
    shape: dict[str, Any] = {"num_hidden_layers": 3}
    if name not in architectures.OTHERS:
        shape |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    return architectures.make(name, **shape | overrides)


def _windows(count: int = 5, length: int = 13) -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (count, length)))


def _harmonic(length: int) -> float:
    return sum(1 / (i + 1) for i in range(length)) / length


def _value(lines: list[dict[str, Any]], metric: str, **dimensions: object) -> float:
    """Of the one line with just these dimensions."""
    wanted = {"metric": metric, **dimensions}
    (found,) = (
        line["value"] for line in lines if {k: v for k, v in line.items() if k != "value"} == wanted
    )
    return found


def _call(*sizes: int, **more: Any) -> AttentionCall:
    """Of random numbers; `more` replaces them, and says which keys are seen."""
    batch, heads, groups, keys, width, *queries = sizes
    seen = {name: more.pop(name) for name in Visibility._fields if name in more}
    q = torch.randn(batch, heads, *(queries or [keys]), width) * 2
    k = torch.randn(batch, groups, keys, width) * 2
    given = {"module": nn.Identity(), "layer": 0, "q": q, "k": k, "scale": 0.6}
    return AttentionCall(**given | more, visibility=Visibility(**seen))


class _Calls(list):
    """A statistic that keeps what it is shown."""

    observe = list.append


@pytest.fixture
def tiny() -> SimpleNamespace:
    """`make(name)`, a model of 3 layers with 4 heads; `ours(preset, **overrides)`; `windows(…)`;
    `harmonic(T)`, which is H_T / T; `value(lines, metric, **dimensions)`; `Calls()`, a statistic
    that keeps what it is shown; `call(B, H, G, S, D, …)`, a layer's attention."""
    names = {"make": _make, "ours": _make, "windows": _windows, "harmonic": _harmonic}
    return SimpleNamespace(**names, value=_value, call=_call, Calls=_Calls)
