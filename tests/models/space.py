"""The points of the axes on which attention depends, valid or refused, at a tiny size."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
from clearhead.models import PRESETS
from clearhead.nn import REGISTRY

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 31,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}
# Of whole models, beside transformers' own.
WHOLE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# Scaled positions.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CAUSAL = [name for name, keys in PRESETS.items() if keys.get("direction") != "bidirectional"]
# The others have no mechanism that one of these lacks: compilers see every branch.
DISTINCT = [
    *("gpt2", "differential", "differential-v2", "coca-strict", "coca-slack"),
    *("pope", "sink", "softpick", "key-value", "gated", "xsa", "alibi", "forget", "xpos", "osp"),
    *("skipless", "sas-p-nonorm"),
]
ATTENTION = ("scores", "normalizer", "maps", "position")


def drawing(length: int = 11, vocabulary: int = 31) -> Callable[..., torch.Tensor]:
    """ids(batch=2, length=length): random tokens."""

    def ids(batch: int = 2, length: int = length) -> torch.Tensor:
        return torch.randint(0, vocabulary, (batch, length))

    return ids


ids = drawing()


def config(**keys: Any) -> ClearheadConfig | None:
    """The configuration, or None where it is refused, in one line."""
    try:
        return ClearheadConfig(**SHAPE | keys)
    except ClearheadError as error:
        if "\n" in str(error):
            raise
        return None


def stirred(model: Any, by: float = 0.3) -> Any:
    """Every number of a model, moved away from where it starts."""
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn_like(p)
    return model.eval()


def displaced(config: ClearheadConfig, by: float) -> ClearheadForCausalLM:
    """A model none of whose numbers is where its paper starts it."""
    torch.manual_seed(0)
    return stirred(ClearheadForCausalLM(config), by)


def uneven(**keys: Any) -> ClearheadForCausalLM:
    """A model in float64 whose weights and gains are all different."""
    torch.manual_seed(0)
    return stirred(ClearheadForCausalLM(ClearheadConfig(**SHAPE | keys)).double())


def attentions() -> list[dict[str, str]]:
    """Every valid combination of scores, normalizer, maps and position."""
    points = product(*map(REGISTRY.names, ATTENTION))
    found = (dict(zip(ATTENTION, point, strict=True)) for point in points)
    return [point for point in found if config(**point) is not None]


def some_attentions() -> list[dict[str, str]]:
    """Every other normalizer and kind of maps at a place; its neighbours have those between."""
    points = attentions()
    places = sorted({(point["scores"], point["position"]) for point in points})
    return [
        point
        for index, place in enumerate(places)
        for point in [p for p in points if (p["scores"], p["position"]) == place][index % 2 :: 2]
    ]


def logits(model: ClearheadForCausalLM) -> torch.Tensor:
    """Its logits of two rows of tokens."""
    with torch.no_grad():
        return model(torch.arange(22).view(2, 11)).logits


def stir(model: Any) -> None:
    """Move what a shaped block starts with away from it: else it would be the identity."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            gain = name.endswith(("shaping.alpha", "shaping.beta", "shaping.gamma", "delta"))
            if gain or (name.endswith("q_proj.weight") and not p.any()):
                p += 0.3 * torch.randn_like(p)


def caches(model: Any) -> list[Any]:
    """Empty caches: one that drops nothing, one that drops what windows hide, and a static one."""
    windows = [] if model.config.sliding_window is None else [DynamicCache(config=model.config)]
    return [DynamicCache(), *windows, StaticCache(config=model.config, max_cache_len=24)]


def eager_agrees(model: Any, ids: torch.Tensor) -> None:
    """Assert that eager attention, the oracle, has the same logits and gradients, none of them 0.

    The model is left eager.
    """
    parameters, both = dict(model.named_parameters()), []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        logits = model(ids, use_cache=False).logits
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        both.append([logits, *torch.autograd.grad(loss, list(parameters.values()))])
    for name, fast, exact in zip(["logits", *parameters], *both, strict=True):
        if name.endswith("k_proj.bias"):
            continue  # the same for every key of a row: softmax does not see it
        assert (fast != 0).any(), name
        assert (fast - exact).abs().max() < 1e-4 * exact.abs().max(), name


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equal logits, to the rounding of float32, and equal greedy tokens."""
    assert (got - want).abs().max() / want.abs().max() < 1e-5
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@torch.no_grad()
def decodes(model: Any, sizes: Sequence[Sequence[int]] = ((11,), (5, 3, 1, 1, 1))) -> None:
    """Assert that every cache gives the logits of the full forward.

    By steps and chunks of `sizes`, after crops, and in rows that are padded on the left.
    """
    length = sum(sizes[0])
    ids, mask = torch.randint(0, 31, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, :4] = 0
    whole = model(ids, use_cache=False).logits
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    close(padded[1, 4:], model(ids[1:, 4:], use_cache=False).logits[0])
    for parts, cache in ((parts, cache) for parts in sizes for cache in caches(model)):
        rows = [model(part, past_key_values=cache).logits for part in ids.split(parts, 1)]
        close(torch.cat(rows, 1), whole)
    for cache in caches(model):
        rows = []
        for start, stop in ((0, 8), (8, 9), (9, length)):
            given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
            rows.append(model(ids[:, start:stop], **given).logits)
        _close_padded(torch.cat(rows, 1), padded, 0)
    cache = DynamicCache()
    model(torch.cat([ids[:, :6], ids[:, :3]], 1), past_key_values=cache)
    cache.crop(-3)
    close(model(ids[:, 6:], past_key_values=cache).logits, whole[:, 6:])
    cache = DynamicCache()
    model(ids[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
    for crop, start in ((0, 7), (9 - length, 9), (-length, 0)):
        cache.crop(crop)
        assert cache.get_seq_length() == start
        given = {"attention_mask": mask, "past_key_values": cache}
        _close_padded(model(ids[:, start:], **given).logits, padded, start)


def _close_padded(got: torch.Tensor, want: torch.Tensor, start: int) -> None:
    close(got[0], want[0, start:])
    close(got[1, max(4 - start, 0) :], want[1, max(4, start) :])
