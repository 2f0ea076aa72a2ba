"""Tiny models with a tokenizer of their own, and the weights that a packed map stands for."""

import base64
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tests_architectures as architectures
import torch
from torch import Tensor

from clearhead.data.tokenizer import train
from clearhead.view import Observation

TEXT = "the cat sat on the mat, and the cat saw the hat on the mat"
VOCABULARY, LAYERS = 300, 3


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train([TEXT * 4], VOCABULARY)


@pytest.fixture(scope="session")
def words() -> str:
    return TEXT


@pytest.fixture
def make() -> Callable[..., Any]:
    """make(name, **overrides): "Llama", "GPT-2", or a preset of three layers with four heads."""

    def built(name: str, **overrides: Any) -> Any:
        torch.manual_seed(0)
        shape: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
        shape["max_position_embeddings"] = 64 if name == "GPT-2" else 256
        if name not in architectures.OTHERS:
            shape["num_key_value_heads"] = 2
        return architectures.make(name, **shape | overrides)

    return built


def unpacked(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def map_of(found: Observation, layer: int, head: int, name: str) -> tuple[Tensor, Tensor | None]:
    """(weights [T, T], null weights [T] or None), as the page's script reads them."""
    packed = found.model["maps"][f"{layer}.{head}"][name]
    length = len(found.model["tokens"])
    levels = unpacked(found.chunks[packed["chunk"]], np.uint8).astype(np.int16) - packed["centre"]
    values = torch.tensor(packed["peak"] * np.sign(levels) * (levels / packed["steps"]) ** 2)
    keys = [range(key if found.model["causal"] else 0, length) for key in range(length)]
    weights = torch.zeros(length, length, dtype=values.dtype)
    start = 0
    for key, queries in enumerate(keys):
        weights[queries.start :, key] = values[start : start + len(queries)]
        start += len(queries)
    null = values[start:]
    assert len(null) == (length if packed["null"] else 0)
    return weights, null if packed["null"] else None


def step(found: Observation, layer: int, head: int, name: str, weights: Tensor) -> Tensor:
    """The largest error that rounding √|w| to a level can cause, with a little for float32."""
    packed = found.model["maps"][f"{layer}.{head}"][name]
    half, peak = 0.5 / packed["steps"], packed["peak"]
    return peak * (2 * (weights.abs() / peak).sqrt() * half + half**2) + 1e-5
