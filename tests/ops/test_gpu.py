"""CUDA's stock kernels owe the same proof as the CPU's before they are trusted: `make gpu`."""

import pytest
import torch

from clearhead.ops import attend, oracles, stock
from clearhead.ops.kernels import Options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# ‖error‖ / ‖exact‖; float32 products may run as TF32 elsewhere.
BOUND = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("length", "groups"), [(63, 4), (129, 2), (1000, 1)])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("shift", [0.0, -6.0], ids=["near", "below"])
@pytest.mark.parametrize("value", [16, 32, 64])
def test_matches_oracle(dtype, sink, causal, length, groups, padded, shift, value):
    q = torch.randn(2, 4, length, 32, device="cuda")
    k = torch.randn(2, groups, length, 32, device="cuda")
    v = torch.randn(2, groups, length, value, device="cuda")
    q[..., 0], k[..., 0] = 32**0.5, shift  # moves every logit, to where the sink matters
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_sink = sink
    if sink == "learned":
        sink = torch.randn(4, device="cuda", requires_grad=True)
        exact_sink = sink.detach().double().requires_grad_()
    mask = None
    if padded:
        mask = torch.ones(2, length, dtype=torch.bool, device="cuda")
        mask[0, : length // 3] = False
    options = {"causal": causal, "key_mask": mask}
    got = attend(*inputs, sink=sink, **options)
    want = oracles.attend(*exact, sink=exact_sink, **options)
    grad = torch.randn_like(want).to(dtype)
    if isinstance(sink, torch.Tensor):
        inputs, exact = [*inputs, sink], [*exact, exact_sink]
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() / b.norm() < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_unpadded_requests_take_the_stock_kernel(dtype):
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype)
    wide = torch.cat([q, q], -1)
    for value in (q, wide):
        assert stock.takes(q, q, value, Options(True, 0.2, None, None, None))
