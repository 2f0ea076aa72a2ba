"""Decay by forget gates: its columns in every dtype, and attention with it, from the formula."""

import pytest
import torch
from torch import Tensor

from clearhead.ops import attend, forget_columns, oracles, with_columns

SCALE = 8**-0.5


def _log_gates(length: int, shared: int, keys: int = 2) -> Tensor:
    return torch.nn.functional.logsigmoid(torch.randn(2, keys, length, shared).double())


def _by_head(log_gates_BPSR: Tensor) -> Tensor:
    return log_gates_BPSR.transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (torch.float64, 2.0**-46),
        *((each, 2.0**-23) for each in (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_columns_carry_the_sum_of_the_gates_between_in_every_dtype(shared, dtype, rounding):
    """The product of the rounded columns; sums of 100 thousand, beyond what float16 holds."""
    log_gates = _log_gates(301, shared)
    log_gates[:, :, 150] = -1e5
    q, k = forget_columns(log_gates, 77, SCALE, dtype)
    assert q.shape[-1] % 8 == k.shape[-1] % 8 == 0
    got = q.double() @ k.double().repeat_interleave(shared, 1).mT * SCALE
    want = oracles.forget_bias(_by_head(log_gates), 77)
    past = torch.ones(77, 301).tril(301 - 77).bool()
    assert ((got - want)[..., past].abs() <= 1e5 * rounding).all()
    assert (got.diagonal(301 - 77, -2, -1) == 0).all()  # a token forgets nothing of itself


MASKS = {
    "plain": {},
    "padded": {"key_mask": torch.tensor([[False] * 4 + [True] * 15, [True] * 17 + [False] * 2])},
    "documents": {"segments": torch.tensor([[0] * 6 + [1] * 13, [0] * 18 + [1]])},
    "in a window": {"window": 5},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("spread", [0.1, 8.0], ids=["low logits", "high logits"])
@pytest.mark.parametrize(("shared", "queries"), [(1, 19), (3, 19), (3, 4)])
@pytest.mark.parametrize("sink", [False, True], ids=["softmax", "sink"])
def test_attention_and_all_its_gradients_are_the_formula_s(masks, spread, shared, queries, sink):
    if "key_mask" in masks and queries < 19:
        return  # of queries that are padding themselves nothing is promised
    heads, log_gates = 2 * shared, _log_gates(19, shared)
    q = spread * torch.randn(2, heads, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 19, 8, dtype=torch.float64)
    logits = torch.randn(heads, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, log_gates, logits)]
    columns = forget_columns(log_gates, queries, SCALE, torch.float64)
    got = attend(
        *map(with_columns, (q, k), columns), v, scale=SCALE, sink=logits if sink else None, **masks
    )
    visible = torch.ones(19, 19).tril().bool()
    if "window" in masks:
        visible &= torch.ones(19, 19).triu(1 - masks["window"]).bool()
    visible = visible.expand(2, 1, 19, 19)
    real = masks.get("key_mask", torch.ones(2, 19).bool())
    if "segments" in masks:
        of = masks["segments"]
        visible = visible & (of[:, None, :, None] == of[:, None, None])
    visible = (visible & real[:, None, None])[:, :, -queries:]
    scores = q @ k.repeat_interleave(shared, 1).mT * SCALE
    scores = scores + oracles.forget_bias(_by_head(log_gates), queries)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink:
        row = logits[:, None, None].expand(2, heads, queries, 1)
        scores = torch.cat([scores, row], -1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., :19]
    want = weights @ v.repeat_interleave(shared, 1)
    kept = real[:, None, -queries:, None]
    assert torch.allclose(got * kept, want * kept, atol=1e-10)
    grad = torch.randn_like(want) * kept
    used = inputs if sink else inputs[:-1]
    for found, expected in zip(
        *(torch.autograd.grad(o, used, grad) for o in (got, want)), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-9)
