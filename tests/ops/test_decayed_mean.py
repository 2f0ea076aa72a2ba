"""The mean that fades with distance, against float64 matrices, with its gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from clearhead import ops
from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility

SLOPES = torch.tensor([0.7, 0.1, 0.004], dtype=torch.float64)


def _places(keys: int, kind: str, mask: Tensor | None) -> Tensor:
    if kind == "counted" and mask is not None:  # as a model counts them
        return (mask.long().cumsum(1) - 1).clamp_min(0)
    if kind == "falling":
        return torch.randint(0, 60, (2, keys))
    return torch.arange(keys)[None]


@pytest.mark.parametrize("places", ["counted", "index", "falling"])
@pytest.mark.parametrize(
    ("padding", "packed"),
    list(itertools.product(["none", "left", "right", "holes"], [False, True])),
)
def test_the_mean_is_the_matrix_s(make_masks, places, padding, packed):
    for keys, queries in ((1, 1), (7, 7), (16, 16), (53, 53), (300, 300), (53, 1), (53, 20)):
        x = torch.randn(2, 3, keys, 5, dtype=torch.float64, requires_grad=True)
        masks = make_masks(keys, padding, packed)
        at = _places(keys, places, masks["key_mask"])
        mean, mass = ops.decayed_mean(x, queries, at, SLOPES, Visibility(**masks))
        want, want_mass = oracles.decayed_mean(x, queries, at, SLOPES, **masks)
        assert mean.shape == (2, 3, queries, 5)
        assert torch.allclose(mean, want, atol=1e-12)
        assert torch.allclose(mass.expand_as(want_mass), want_mass, rtol=1e-12)
        weight = torch.randn_like(mean)
        ours, theirs = (torch.autograd.grad((m * weight).sum(), x)[0] for m in (mean, want))
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_float32_whatever_comes_in_and_however_long(dtype, autocast):
    """Steep slopes at 60,000 tokens neither overflow nor lose the near; autocast rounds nothing."""
    x, at = torch.randn(1, 2, 60_000, 2).to(dtype), torch.arange(60_000)[None]
    slopes = torch.tensor([0.7, 1e-3])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mean, mass = ops.decayed_mean(x, 60_000, at, slopes)
        lone, _ = ops.decayed_mean(x, 1, at, slopes)
    assert mean.dtype == torch.float32
    # From the formula's recurrence, in float64: s_t = exp(−slope) s_(t−1) + x_t.
    factor = torch.exp(-slopes.double())[:, None]
    sums, total = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    for x_HD in x[0].double().unbind(1):
        sums, total = sums * factor + x_HD, total * factor + 1
    assert (mean[0, :, -1] - sums / total).abs().max() < 2e-6
    assert mean.isfinite().all()
    assert (lone[0, :, 0] - sums / total).abs().max() < 2e-6
    assert torch.allclose(mass[0, :, -1:].double(), total, rtol=1e-5)


def test_what_is_hidden_may_be_anything():
    x = torch.randn(1, 3, 9, 2)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, :2] = False
    x[:, :, :2] = torch.nan
    mean, mass = ops.decayed_mean(x, 9, torch.arange(9)[None], SLOPES, Visibility(key_mask=mask))
    assert mean.isfinite().all()
    assert (mean[:, :, :2] == 0).all()
    assert (mass[:, :, :2] == 0).all()


def test_slopes_near_zero_give_the_plain_mean():
    x = torch.randn(2, 3, 70, 5, dtype=torch.float64)
    at, slopes = torch.arange(70)[None], torch.full((3,), 1e-14, dtype=torch.float64)
    mean, mass = ops.decayed_mean(x, 70, at, slopes)
    plain, count = ops.running_mean(x, 70)
    assert torch.allclose(mean, plain, atol=1e-10)
    assert torch.allclose(mass, count[:, None].expand_as(mass))
