"""cuDNN's kernel as PyTorch calls it: plans kept by the strides of q, k and v alone.

A stand-in on a CPU keeps plans as PyTorch does and reads o and its gradient with the strides of the
plan's first ones, which gave wrong gradients on an H100 (docs/log.md).
"""

from itertools import product

import pytest
import torch

from clearhead import ops
from clearhead.ops import cuda_cudnn, dispatch, oracles
from tests.ops import stand_ins

SHAPE = (2, 3, 40, 8)


def _like(x, q):
    """x in the memory order of q, as cuDNN's outputs are."""
    order = sorted(range(4), key=lambda axis: -q.stride(axis))
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@pytest.fixture
def plans(monkeypatch):
    kept = {}

    def forward(q, *rest, **options):
        o, *others = stand_ins._scaled_dot_product_cudnn_attention(q, *rest, **options)
        return _like(o, q), *others

    def backward(grad, q, k, v, o, *rest, **options):
        key = q.shape, q.stride(), k.stride(), v.stride()
        strides = kept.setdefault(key, (grad.stride(), o.stride()))
        grad, o = (x.as_strided(x.shape, s) for x, s in zip((grad, o), strides, strict=True))
        by = stand_ins._scaled_dot_product_cudnn_attention_backward
        gradients = by(grad.contiguous(), q, k, v, o.contiguous(), *rest, **options)
        return tuple(_like(d, x) for d, x in zip(gradients, (q, k, v), strict=True))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    kernel = dispatch.KERNELS["cudnn"]._replace(device="cpu", refuses=lambda request: None)
    monkeypatch.setitem(dispatch.KERNELS, "cudnn", kernel)
    yield kept
    library._destroy()
    dispatch._chosen.cache_clear()


def _drawn(by_token):
    batch, heads, length, width = SHAPE
    if by_token:
        return torch.randn(batch, length, heads, width).transpose(1, 2)
    return torch.randn(SHAPE)


@pytest.mark.parametrize(
    ("by_token", "backend"), [(False, "aot_eager"), (True, "aot_eager"), (True, "inductor")]
)
def test_gradients_with_a_sink_are_right_in_every_layout_of_one_process(plans, by_token, backend):
    torch._dynamo.reset()
    sink = torch.randn(SHAPE[1])
    eager = lambda q, k, v: ops.attend(q, k, v, sink=sink, kernel="cudnn")  # noqa: E731
    runs = eager, torch.compile(eager, backend=backend, fullgraph=True)
    for run, values, gradient in product(runs, (False, True), (False, True)):
        inputs = [_drawn(by_token), _drawn(by_token), _drawn(values)]
        grad = _drawn(gradient)
        inputs = [x.detach().requires_grad_() for x in inputs]
        o = run(*inputs)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        want = oracles.attend(*exact, sink=sink.double())
        torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(o, inputs, grad)
        for a, b in zip(ours, torch.autograd.grad(want, exact, grad.double()), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert len(plans) == 2  # by the layout of v: the others have one each


def test_the_gradients_operator_keeps_pytorch_s_contract(plans):
    inputs = [torch.randn(SHAPE) for _ in range(5)]
    lse = torch.randn(SHAPE[:3])
    torch.library.opcheck(
        cuda_cudnn._gradients,
        (*inputs, lse, 0.3, True),
        test_utils=("test_schema", "test_faketensor"),
    )
