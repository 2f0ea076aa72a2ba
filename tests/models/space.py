"""The points of the axes on which attention depends, valid or refused, at a tiny size."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, ClearheadForMaskedLM
from clearhead.models import PRESETS, preset
from clearhead.nn import REGISTRY

DEEP: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
SHAPE = DEEP | {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 31, "head_dim": 8}
SHAPE |= {"max_position_embeddings": 24, "num_key_value_heads": 2}
# Of whole models, beside transformers' own.
WHOLE = DEEP | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61}
WHOLE |= {"max_position_embeddings": 64}
# Scaled positions.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
YARN |= {"original_max_position_embeddings": 32}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CAUSAL = [name for name, keys in PRESETS.items() if keys.get("direction") != "bidirectional"]
# Every mechanism, some of them in one model: a compiler sees each branch.
MECHANISMS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"epilogue": "xsa"}),
    ("osp", {"epilogue": "gate"}),
    ("skipless", {"scores": "coca-strict", "query_range": 0.3}),
    ("pope", {"normalizer": "softpick"}),
    ("sink", {"position": "xpos"}),
    ("key-value", {"position": "alibi"}),
    *((name, {}) for name in ("differential", "differential-v2", "coca-slack", "forget")),
    ("sas-p-nonorm", {}),
]
ATTENTION = ("scores", "normalizer", "maps", "position")


def ids(batch: int = 2, length: int = 11, vocabulary: int = 31) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, vocabulary, (batch, length))


def drawing(length: int, vocabulary: int) -> Callable[..., torch.Tensor]:
    """`ids` of another length and vocabulary."""
    return lambda batch=2, length=length: ids(batch, length, vocabulary)


def config(**keys: Any) -> ClearheadConfig | None:
    """The configuration, or None where it is refused, in one line."""
    try:
        return ClearheadConfig(**SHAPE | keys)
    except ClearheadError as error:
        if "\n" in str(error):
            raise
        return None


def build(name: str = "transformer", **keys: Any) -> Any:
    """A whole model of a preset, as it starts: causal, or for hidden tokens."""
    torch.manual_seed(0)
    config = preset(name, **WHOLE | keys)
    kind = ClearheadForCausalLM if config.direction == "causal" else ClearheadForMaskedLM
    return kind(config).eval()


def stirred(model: Any, by: float = 0.3) -> Any:
    """Every number of a model, moved away from where it starts."""
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn_like(p)
    return model.eval()


def displaced(config: ClearheadConfig, by: float = 0.3) -> ClearheadForCausalLM:
    """A model none of whose numbers is where its paper starts it."""
    torch.manual_seed(0)
    return stirred(ClearheadForCausalLM(config), by)


def uneven(**keys: Any) -> ClearheadForCausalLM:
    """A model in float64 whose weights and gains are all different."""
    return displaced(ClearheadConfig(**SHAPE | keys)).double()


@functools.cache
def attentions() -> dict[tuple[str, str], list[dict[str, str]]]:
    """Every valid combination of scores, normalizer, maps and position, by scores and position."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for values in product(*map(REGISTRY.names, ATTENTION)):
        point = dict(zip(ATTENTION, values, strict=True))
        if config(**point) is not None:
            found.setdefault((point["scores"], point["position"]), []).append(point)
    return found


@torch.no_grad()
def logits(model: ClearheadForCausalLM) -> torch.Tensor:
    """Its logits of two rows of tokens."""
    return model(torch.arange(22).view(2, 11)).logits


def caches(model: Any) -> list[Any]:
    """Empty caches: one that drops nothing, one that drops what windows hide, and a static one."""
    windows = [] if model.config.sliding_window is None else [DynamicCache(config=model.config)]
    return [DynamicCache(), *windows, StaticCache(config=model.config, max_cache_len=24)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equal logits, to the rounding of float32, and equal greedy tokens."""
    assert (got - want).abs().max() / want.abs().max() < 1e-5
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@torch.no_grad()
def decodes(model: Any) -> None:
    """Assert that every cache gives the logits of the full forward.

    By steps and chunks, after crops, and in rows that are padded on the left.
    """
    drawn, mask = ids(), torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    whole = model(drawn, use_cache=False).logits
    padded = model(drawn, attention_mask=mask, use_cache=False).logits
    close(padded[1, 4:], model(drawn[1:, 4:], use_cache=False).logits[0])
    chunks = (5, 3, 1, 1, 1), (2, 1, 1, 7)
    for parts, cache in [(parts, cache) for parts in chunks for cache in caches(model)]:
        rows = [model(part, past_key_values=cache).logits for part in drawn.split(parts, 1)]
        close(torch.cat(rows, 1), whole)
        if isinstance(cache, StaticCache):
            cache.reset()
            close(model(drawn, past_key_values=cache).logits, whole)
    for cache in caches(model):
        rows = []
        for start, stop in ((0, 8), (8, 9), (9, 11)):
            given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
            rows.append(model(drawn[:, start:stop], **given).logits)
        _close_padded(torch.cat(rows, 1), padded, 0)
    cache = DynamicCache()
    model(torch.cat([drawn[:, :6], drawn[:, :3]], 1), past_key_values=cache)
    cache.crop(-3)
    close(model(drawn[:, 6:], past_key_values=cache).logits, whole[:, 6:])
    cache = DynamicCache()
    model(drawn[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
    for crop, start in ((0, 7), (-2, 9), (-11, 0)):
        cache.crop(crop)
        assert cache.get_seq_length() == start
        given = {"attention_mask": mask, "past_key_values": cache}
        _close_padded(model(drawn[:, start:], **given).logits, padded, start)


def _close_padded(got: torch.Tensor, want: torch.Tensor, start: int) -> None:
    close(got[0], want[0, start:])
    close(got[1, max(4 - start, 0) :], want[1, max(4, start) :])
