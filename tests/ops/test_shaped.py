"""Shaped attention over its own running mean, and whether Triton can start a kernel."""

import pytest
import torch

from clearhead import ops
from clearhead.ops import oracles, precision

FP32, BF16 = torch.float32, torch.bfloat16
BOUND = {torch.float64: 1e-12, FP32: 3e-6, BF16: 8e-3}


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
    grad = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    for a, b, like in zip(found, expected, (inputs[0], *inputs), strict=True):
        assert a.dtype == like.dtype
        # A gradient of a gain sums over what may have been rounded on the way.
        bound = max(BOUND[t.dtype] for t in inputs) if a.ndim == 1 else BOUND[a.dtype]
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("lacking", ["a compiler", "Python's headers", "Triton", "nothing"])
def test_where_no_kernel_can_start_the_plain_paths_serve(lacking, monkeypatch, tmp_path):
    """As in slim images: Triton is there, and what it starts a kernel with is not."""
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
