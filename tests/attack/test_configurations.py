"""Any point of the axes, with hostile numbers: it trains, decodes and reloads, or is refused."""

import math
import random
import tempfile
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, ClearheadForMaskedLM
from clearhead.models import plan
from clearhead.nn import REGISTRY
from clearhead.spec import AXES

from ..models.space import SHAPE
from .conftest import TEXTS, withstands

NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.5, 1e-30, 1e6, 10**23, math.nan, math.inf, -math.inf)
ROPES = ("default", "linear", "dynamic", "yarn", "llama3")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (8, 15),
    "num_hidden_layers": (1,),
    "num_attention_heads": (1, 2, 8),
    "num_key_value_heads": (1, 4),
    "head_dim": (2, 8),
    "max_position_embeddings": (8, 24),
    "lambda_init": (0.2, 0.8),
    "head_norm": ("affine", "plain", "none"),
    "num_value_heads": (2, 4),
    "first_values": REGISTRY.names("values"),
    "value_init": ("normal", "orthogonal", "identity"),
    "value_gain": (0.2,),
    "query_range": (0.3,),
    "attention_gain": (0.5,),
    "mlp_gain": (0.1, "depth"),
    "mlp_skip_gain": (1.0,),
    "embedding_norm": REGISTRY.names("norm"),
    "dropout": (0.1,),
    "bias": (True,),
    "norm_eps": (1e-6,),
    "initializer_range": (0.02,),
    "tie_word_embeddings": (True,),
}


def _value(draw: random.Random, usual: tuple[Any, ...]) -> Any:
    if draw.random() < 0.8:
        return draw.choice(usual)
    return draw.choice((*NUMBERS, *TEXTS, None, [], {}))


def _point(draw: random.Random) -> dict[str, Any]:
    """Some axes and options away from the baseline's, one value in five of them hostile."""
    point: dict[str, Any] = SHAPE | {"head_dim": 4}
    for axis in draw.sample(list(AXES), draw.randint(0, 5)):
        point[axis] = draw.choice(REGISTRY.names(axis))
    for name in draw.sample(list(OPTIONS), draw.randint(0, 3)):
        point[name] = _value(draw, OPTIONS[name])
    if draw.random() < 0.3:
        rope = {"rope_type": draw.choice(ROPES)}
        for name in ("factor", "rope_theta", "low_freq_factor", "high_freq_factor"):
            if draw.random() < 0.6:
                rope[name] = _value(draw, (1.0, 2.0, 4.0, 100.0))
        point["rope_parameters"] = rope
    return point


def _use(config: ClearheadConfig) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, 9))
    causal = config.direction == "causal"
    model: Any = (ClearheadForCausalLM if causal else ClearheadForMaskedLM)(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        loss = model(ids, labels=ids).loss
        assert loss.isfinite(), f"loss {loss} in step {step}"
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        full, cache = model.eval()(ids, use_cache=False).logits, DynamicCache(config=config)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder).eval()
        assert torch.equal(again(ids, use_cache=False).logits, full)
        assert again.config.layer(0) == config.layer(0)
        if not causal:
            return
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:])
        ]
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    if not getattr(config, "sliding_window", None):
        assert plan(config, length=9).cache_bytes == 2 * held // (2 * 9)
    if (config.rope_parameters or {}).get("rope_type") != "dynamic":  # whose base moves by design
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_configurations_work_or_are_refused_in_one_line():
    def attack(draw: random.Random) -> None:
        point = _point(draw)
        refusal = ""
        try:
            _use(ClearheadConfig(**point))
        except ClearheadError as error:
            refusal = str(error)
        except Exception as error:
            raise AssertionError(f"{point}\n{type(error).__name__}: {error}") from error
        assert "\n" not in refusal, f"{point}\n{refusal}"

    withstands("configurations", attack)
