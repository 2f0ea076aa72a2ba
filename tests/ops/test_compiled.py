"""Custom autograd functions, eager and compiled: the same outputs and gradients of every input."""

from itertools import product

import pytest
import torch
from torch import Tensor

from clearhead import ops

B, H, G, T, S, D, V = 2, 4, 2, 5, 7, 6, 10
MASKS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "padded": {"key_mask": torch.arange(S) >= torch.tensor([[0], [2]])},
    "packed": {"segments": torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2]])},
}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("sink", "prefixed", "mask"),
    product((None, "softmax1", "by head", "by query"), (False, True), MASKS),
)
def test_attention(sink, prefixed, mask):
    torch._dynamo.reset()
    inputs = {"q": _random(B, H, T, D), "k": _random(B, G, S, D), "v": _random(B, G, S, V)}
    if sink in ("by head", "by query"):
        inputs["sink"] = _random(H) if sink == "by head" else _random(B, H, T)
    if prefixed:
        inputs |= {"prefix_k": _random(B, G, 3, D), "prefix_v": _random(B, G, 3, V)}

    def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Tensor:
        given = 0.0 if sink == "softmax1" else rest.get("sink")
        prefix = (rest["prefix_k"], rest["prefix_v"]) if prefixed else None
        return ops.attend(q, k, v, sink=given, prefix=prefix, **MASKS[mask])

    _agree(attend, inputs)


def test_attention_to_keys_that_are_the_values_or_the_queries():
    x = {"x": _random(B, H, S, D)}
    _agree(lambda x: ops.attend(x, x, x, sink=0.0), x)
    _agree(lambda x: ops.attend(2 * x, x, x), x)


@pytest.mark.parametrize("mean", [False, True])
def test_linear_cross_entropy(mean):
    target = torch.tensor([3, -100, 0, 10, 2])
    inputs = {"x": _random(5, D), "weight": _random(11, D)}

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        total = ops.linear_cross_entropy(x, weight, target, ignore_index=-100)
        return total / 4 if mean else total

    _agree(loss, inputs)


def _agree(function, inputs: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        out = run(**inputs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), list(inputs.values()))))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
