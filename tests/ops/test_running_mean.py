"""The running mean and the shaped sum against float64, with every gradient; Triton's start."""

import itertools

import pytest
import torch

from clearhead import ops
from clearhead.ops import precision
from clearhead.ops.running_mean import WAYS, fastest, running_sum
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import agree


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("padding", "packed"), list(itertools.product(["none", "left", "right"], [False, True]))
)
def test_the_mean_is_the_matrix_s(make_masks, causal, padding, packed):
    for keys, queries in ((1, 1), (7, 7), (16, 16), (53, 53), (53, 1), (53, 20)):
        x = torch.randn(2, 3, keys, 5, dtype=torch.float64, requires_grad=True)
        masks = make_masks(keys, padding, packed)
        mean, count = ops.running_mean(x, queries, Visibility(causal, **masks))
        want, want_count = oracles.running_mean(x, queries, causal=causal, **masks)
        assert torch.equal(count.expand_as(want_count), want_count)
        agree(mean, want, [x], bound=1e-12, least=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_comes_in(dtype):
    x = torch.randn(1, 1, 2051, 3).to(dtype)
    for queries in (2051, 1):
        mean, _ = ops.running_mean(x, queries)
        want, _ = oracles.running_mean(x, queries)
        assert mean.dtype == torch.float32
        assert (mean - want).abs().max() < 2e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert (ops.running_mean(x, 2051)[0] - oracles.running_mean(x, 2051)[0]).abs().max() < 2e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 31, 32, 100, 256])
def test_every_way_of_summing_gives_the_same(way, length):
    """Also the ways that only a GPU or a compiler takes: in float64, with the gradient."""
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    sums = running_sum(x, way)
    want = torch.ones(length, length, dtype=torch.float64).tril() @ x
    agree(sums, want, [x], bound=1e-12)


def test_the_way_is_the_device_s(monkeypatch):
    here, elsewhere = torch.ones(1, 1, 40, 2), torch.ones(1, 1, 40, 2, device="meta")
    ways = [fastest(x) for x in (here[:, :, :16], here, elsewhere)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [*ways, fastest(here), fastest(elsewhere)] == [
        *("scan", "products", "blocks"),
        *("unrolled", "scan"),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_summing_is_rounded_by_autocast(way):
    x = torch.randn(1, 1, 2051, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        sums = running_sum(x, way)
    assert sums.dtype == torch.float32
    assert (sums - x.double().cumsum(2)).abs().max() < 1e-4
    (gradient,) = torch.autograd.grad(sums.sum(), x)
    assert torch.equal(gradient[0, 0, :, 0], torch.arange(2051.0, 0, -1))


def test_what_is_hidden_may_be_anything():
    x = torch.randn(1, 1, 9, 2)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, :2] = False
    x[:, :, :2] = torch.nan
    mean, count = ops.running_mean(x, 9, Visibility(key_mask=mask))
    assert mean.isfinite().all()
    assert (mean[:, :, :2] == 0).all()
    assert count[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("length", [1, 7, 63, 129])
@pytest.mark.parametrize(
    ("x", "o"), [(torch.float64, torch.float64), (FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=str
)
def test_shaped_over_the_running_mean(length, x, o):
    """Output and every gradient; gains are in the dtype of x."""
    torch.manual_seed(length)
    inputs = [torch.randn(2, length, 3, 20).to(dtype) for dtype in (x, o)]
    inputs += [torch.randn(3, dtype=x) for _ in range(3)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def run(source, x, o, alpha, beta, gamma):
        mean, _ = source.running_mean(x.transpose(1, 2), length)
        return x, o, mean.transpose(1, 2), alpha, beta, gamma

    got = ops.shaped(*run(ops, *inputs))
    own, out, mean, *gains = run(oracles, *exact)
    alpha, beta, gamma = (gain[:, None] for gain in gains)
    want = alpha * own + beta * out - gamma * mean
    assert got.dtype == x
    bound = {torch.float64: 1e-12, FP32: 3e-6, BF16: 8e-3}[o]
    agree(got, want, inputs, exact, bound=2 * bound)


@pytest.mark.parametrize("lacking", ["a compiler", "Python's headers", "Triton", "nothing"])
def test_where_no_kernel_can_start_the_plain_paths_serve(lacking, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    found = {
        "a compiler": (precision.shutil, "which", lambda _name: None),
        "Python's headers": (precision.sysconfig, "get_config_var", lambda _name: None),
        "Triton": (precision.importlib.util, "find_spec", lambda _name: None),
    }
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(precision.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(precision.sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name)
    if lacking in found:
        monkeypatch.setattr(*found[lacking])
    assert precision._startable() == (lacking == "nothing")
