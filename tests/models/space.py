"""The points of the axes on which attention depends, valid or refused, at a tiny size."""

from itertools import product
from typing import Any

import torch

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
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
ATTENTION = ("scores", "normalizer", "maps", "position")


def config(**keys: Any) -> ClearheadConfig | None:
    """The configuration, or None where it is refused, in one line."""
    try:
        return ClearheadConfig(**SHAPE | keys)
    except ClearheadError as error:
        if "\n" in str(error):
            raise
        return None


def displaced(config: ClearheadConfig, by: float) -> ClearheadForCausalLM:
    """A model none of whose numbers is where its paper starts it."""
    torch.manual_seed(0)
    model = ClearheadForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn_like(parameter)
    return model


def attentions() -> list[dict[str, str]]:
    """Every valid combination of scores, normalizer, maps and position."""
    points = product(*map(REGISTRY.names, ATTENTION))
    found = (dict(zip(ATTENTION, point, strict=True)) for point in points)
    return [point for point in found if config(**point) is not None]


def uneven(**keys: Any) -> ClearheadForCausalLM:
    """A model in float64 whose weights and gains are all different."""
    torch.manual_seed(0)
    model = ClearheadForCausalLM(ClearheadConfig(**SHAPE | keys)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


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


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    """Every number that starts as a constant, moved away from it."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model.eval()
