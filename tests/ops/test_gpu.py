"""CUDA's stock kernels owe the CPU's proof before they are trusted: `make gpu-check`."""

import itertools

import pytest
import torch

from benchmarks import dispatch_table
from clearhead.ops import attend, dispatch, oracles, running_mean, self_test
from clearhead.ops.dispatch import arguments_of, request
from clearhead.ops.running_mean import WAYS, running_sum
from clearhead.ops.visibility import Visibility

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# ‖error‖ / ‖exact‖; float32 products may run as TF32 elsewhere.
BOUND = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}


CUDA = [name for name, kernel in dispatch.KERNELS.items() if kernel.device == "cuda"]


def _tokens(length: int, padding: str) -> torch.Tensor | None:
    if padding == "whole":
        return None
    at = torch.arange(length, device="cuda").expand(2, -1)
    if padding == "holes":
        return at % 5 != torch.tensor([[1], [7]], device="cuda")
    first = torch.tensor([[length // 3], [0]], device="cuda")
    return at < length - first if padding == "right" else at >= first


MASKS = {
    "whole": {},
    "left": {"padding": "left"},
    "right": {"padding": "right"},
    "holes": {"padding": "holes"},
    "documents": {"documents": True},
    "padded documents": {"padding": "left", "documents": True},
    "window": {"window": 50},
    "window, documents": {"window": 50, "documents": True},
    "window, holes": {"window": 50, "padding": "holes"},
}


SHAPES = [(63, 63, 4), (129, 129, 2), (1000, 1000, 1), (70, 200, 2), (1, 300, 2)]
SINKS = [(None, 0.0, 32), (0.0, -6.0, 64), ("learned", -6.0, 16), (None, 0.0, 16)]
# Every kernel with every mask and every shape once; dtypes, sinks and widths take turns.
CASES = [
    (kernel, causal, shape, masks, list(BOUND)[number % 3], SINKS[number % 4])
    for kernel in [*CUDA, "tiles"]
    for number, (masks, shape, causal) in enumerate(itertools.product(MASKS, SHAPES, [True, False]))
]


@pytest.mark.parametrize(("kernel", "causal", "shape", "masks", "dtype", "of_sink"), CASES)
def test_matches_oracle(kernel, causal, shape, masks, dtype, of_sink):
    """Every kernel, in whatever it says that it serves."""
    (queries, keys, groups), (sink, shift, value) = shape, of_sink
    torch.manual_seed(0)
    window = MASKS[masks].get("window")
    q = torch.randn(2, 4, queries, 32, device="cuda")
    k = torch.randn(2, groups, keys, 32, device="cuda")
    v = torch.randn(2, groups, keys, value, device="cuda")
    q[..., 0], k[..., 0] = 32**0.5, shift  # moves every logit, to where the sink matters
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    mask = _tokens(keys, MASKS[masks].get("padding", "whole"))
    options = {"causal": causal, "key_mask": mask, "window": window}
    if MASKS[masks].get("documents"):
        segments = torch.arange(keys, device="cuda") * 4 // keys % 3
        options["segments"] = segments.expand(2, -1)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_sink = sink
    if sink == "learned":
        sink = torch.randn(4, device="cuda", requires_grad=True)
        exact_sink = sink.detach().double().requires_grad_()
    refusal = _refusal(kernel, inputs, options, sink is not None)
    if refusal is not None:
        pytest.skip(refusal)
    got = attend(*inputs, sink=sink, kernel=kernel, **options)
    want = oracles.attend(*exact, sink=exact_sink, **options)
    shown = torch.ones((), device="cuda") if mask is None else mask[:, None, -queries:, None]
    grad = (torch.randn_like(want) * shown).to(dtype)
    if isinstance(sink, torch.Tensor):
        inputs, exact = [*inputs, sink], [*exact, exact_sink]
    found = [got * shown, *torch.autograd.grad(got, inputs, grad)]
    expected = [want * shown, *torch.autograd.grad(want, exact, grad.double())]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= BOUND[dtype] * b.norm()


def _refusal(kernel, inputs, options, sink):
    """What the kernel says of such requests itself, before any test of it."""
    visibility = Visibility(**options).settled(inputs[0].shape[2], inputs[1].shape[2])
    asked = request(*arguments_of(*inputs, visibility, sink=sink))
    return dispatch.KERNELS[kernel].refuses(asked)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("title", dispatch_table.REQUESTS)
def test_typical_requests_go_where_the_table_says(dtype, title):
    """Every kernel chosen has passed its test on this device."""
    device = {"device": "cuda", "ordinal": 0, "dtype": dtype}
    asked = dispatch_table.PLAIN._replace(**device, **dispatch_table.REQUESTS[title])
    asked = asked._replace(capability=torch.cuda.get_device_capability())
    proved = dispatch.resolve(asked, failure=self_test.failure)
    assert proved == dispatch.resolve(asked)


@pytest.mark.parametrize("kernel", ["flash", "flash-packed", "efficient"])
def test_attention_takes_any_layout_and_is_compiled_in_one_graph(kernel):
    torch._dynamo.reset()
    q = torch.randn(2, 4, 130, 67, device="cuda", dtype=torch.bfloat16)[..., 1:-2].requires_grad_()
    options = {"sink": 0.0, "kernel": kernel}
    if kernel == "flash-packed":
        options["key_mask"] = _tokens(130, "left")
    run = torch.compile(attend, fullgraph=True)
    runs = []
    for job in (attend, run):
        out = job(q, q.sin(), q.cos(), **options)
        runs.append([out, *torch.autograd.grad(out.square().sum(), q)])
    for a, b in zip(*runs, strict=True):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True])
def test_running_sums_are_float32(way, autocast):
    x = torch.randn(2, 3, 1025, 40, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        sums = running_sum(x, way)
    grad = torch.randn_like(sums)
    (got,) = torch.autograd.grad(sums, x, grad)
    want = grad.double().flip(2).cumsum(2).flip(2)
    assert (sums - x.double().cumsum(2)).abs().max() < 1e-4
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_means(causal, compiled):
    """As a layer takes them: bfloat16 in, float32 out, eager and compiled."""
    torch._dynamo.reset()
    x = torch.randn(2, 3, 1025, 40, device="cuda").bfloat16().requires_grad_()
    mask = torch.ones(2, 1025, dtype=torch.bool, device="cuda")
    mask[0, :300] = False
    fast = torch.compile(running_mean) if compiled else running_mean
    for masks in ({}, {"key_mask": mask}):
        mean, weight = fast(x, 1025, Visibility(causal, **masks))
        want, want_weight = oracles.running_mean(x, 1025, causal=causal, **masks)
        assert mean.dtype == torch.float32
        assert (mean - want).abs().max() < 2e-5
        assert torch.allclose(weight.double().expand_as(want_weight), want_weight, rtol=1e-5)
        grad = torch.randn_like(mean)
        got, expected = (torch.autograd.grad(m, x, grad.to(m.dtype))[0] for m in (mean, want))
        assert (got - expected).abs().max() < 2e-2 * expected.abs().max()  # both are bfloat16
