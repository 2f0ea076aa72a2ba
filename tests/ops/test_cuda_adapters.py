"""The adapters around PyTorch's CUDA kernels, without a GPU: stand-ins of the kernels, in float64.

Outputs and all gradients against the oracle. `test_gpu.py` runs the kernels themselves.
"""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import dispatch_table
from clearhead.ops import attend, cuda_cudnn, cuda_sdpa, dispatch, oracles, packed, self_test
from clearhead.ops.packing import packing
from clearhead.ops.requests import Call
from clearhead.ops.visibility import Visibility
from tests.ops import stand_ins
from tests.ops.agreement import agree, compare
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("cuda_kernels")
DENSE, PACKED = ["flash", "efficient", "cudnn"], ["flash-packed", "efficient"]


@pytest.mark.parametrize("kernel", DENSE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sink", [None, 0.0, "a head"])
def test_whole_texts(kernel, causal, sink, use):
    use(kernel)
    compare(queries=19, causal=causal, sink=sink, least=1.0)


@pytest.mark.parametrize("kernel", DENSE)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("width", "value"), [(8, 16), (16, 8), (12, 12), (5, 3)])
def test_grouped_queries_and_widths(kernel, heads, groups, width, value, use):
    use(kernel)
    shape = {"heads": heads, "groups": groups, "width": width, "value": value}
    compare(queries=19, sink="a head", least=1.0, **shape)


@pytest.mark.parametrize("queries", [1, 5, 19])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (7, True), (4, False)])
def test_queries_are_the_last_of_the_keys(queries, window, causal, use):
    if causal or queries > 1:
        use("flash")
        shape = {"queries": queries, "keys": 19, "sink": "a head"}
        compare(window=window, causal=causal, least=1.0, **shape)


@pytest.mark.parametrize("kernel", PACKED)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("queries", [40, 9, 1])
def test_padding_and_documents(kernel, causal, padding, documents, queries, make_masks, use):
    if (padding == "none" and not documents) or (kernel == "efficient" and queries < 40):
        return
    use(kernel)
    masks = make_masks(40, padding, documents)
    shape = {"queries": queries, "keys": 40, "value": 16, "sink": "a head"}
    compare(causal=causal, least=1.0, **shape, **masks)


@pytest.mark.parametrize("kernel", PACKED)
@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("documents", [False, True])
def test_windows_count_places_and_not_tokens(kernel, padding, documents, make_masks, use):
    """Where a hidden token lies between two others, a packed text brings them together."""
    use(kernel)
    masks = make_masks(40, padding, documents)
    compare(queries=40, window=6, sink="a head", least=1.0, **masks)


@pytest.mark.parametrize("kernel", [*DENSE, "flash-packed"])
def test_memory_layouts(kernel, use):
    """Loads of 16 bytes need rows that begin at a multiple of them."""
    use(kernel)
    masks = {}
    if kernel == "flash-packed":
        masks["segments"] = (torch.arange(19) > 6).int().expand(2, -1)
    for layout in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[:, :1].expand(x.shape),
    ):
        compare(queries=19, layout=layout, sink="a head", least=1.0, **masks)


@pytest.mark.parametrize("kernel", ["flash", "flash-packed", "efficient"])
def test_compiled_in_one_graph(kernel, use):
    use(kernel)
    torch._dynamo.reset()
    q = torch.randn(2, 4, 19, 8, requires_grad=True, dtype=torch.float64)
    options = {"sink": 0.0}
    if kernel in PACKED:
        options["key_mask"] = torch.arange(19).expand(2, -1) >= torch.tensor([[0], [5]])
        options["segments"] = (torch.arange(19) > 6).int().expand(2, -1)
    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got, want = (job(q, q.sin(), q.cos(), **options) for job in (run, attend))
    agree(got, want, [q], bound=1e-12)


def test_the_operators_keep_pytorch_s_contract():
    q = torch.randn(2, 4, 19, 8, dtype=torch.float64)
    mask = torch.arange(19).expand(2, -1) >= torch.tensor([[0], [5]])
    rest = (0.3, True, None, mask, None, "flash")
    torch.library.opcheck(packed._forward, (q, q[:, :2], q[:, :2], *rest))
    o, lse = packed._forward(q, q[:, :2], q[:, :2], *rest)
    torch.library.opcheck(packed._backward, (q.sin(), o, lse, q, q[:, :2], q[:, :2], *rest))


def test_masks_are_read_once_for_all_layers_and_again_when_written_to():
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    visibility = Visibility(key_mask=mask)
    first = packing(visibility.key_mask, None, 9)
    assert packing(visibility.of_keys(0).key_mask, None, 9) is first
    assert packing(mask, None, 4) is not first
    mask[1, :5] = False
    assert packing(mask, None, 9).ends_k.tolist() == [0, 3, 9, 14, 18]


SDPA = {
    "whole": {},
    "both ways": {"causal": False},
    "grouped": {"groups": 2},
    "grouped, half precision's way": {"groups": 1, "dtype": torch.bfloat16},
    "one query": {"queries": 1, "keys": 37},
    "one query, grouped": {"queries": 1, "keys": 37, "groups": 2},
    "one query, padded": {"queries": 1, "keys": 37, "groups": 2, "padded": True, "value": 24},
    "both ways, fewer queries": {"queries": 5, "keys": 37, "causal": False, "groups": 1},
}


@pytest.mark.parametrize("title", SDPA)
@pytest.mark.parametrize("autocast", [False, True])
def test_softmax_by_pytorchs_own_call(title, autocast):
    """Outputs and all gradients; the function knows no device."""
    options = {"queries": 37, "causal": True, "groups": 4, "dtype": torch.float32} | SDPA[title]
    queries, dtype = options["queries"], options["dtype"]
    keys, width = options.get("keys", queries), options.get("value", 16)
    shapes = (2, 4, queries, 16), *((2, options["groups"], keys, w) for w in (16, width))
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    mask = torch.arange(keys) >= torch.tensor([[0], [11]]) if options.get("padded") else None
    visibility = Visibility(options["causal"], None, mask, None).settled(queries, keys)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        o = cuda_sdpa.attend(Call(*inputs, 0.3, visibility))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = oracles.attend(*exact, scale=0.3, **visibility._asdict())
    assert o.dtype == dtype
    agree(o, want, inputs, exact, bound=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("queries", [37, 1])
def test_pytorchs_own_call_is_compiled_in_one_graph_and_passes_the_test_of_a_device(
    groups, queries
):
    torch._dynamo.reset()
    q, k = torch.randn(2, 4, queries, 16), torch.randn(2, groups, 37, 16)
    visibility = Visibility().settled(queries, 37)
    run = torch.compile(cuda_sdpa.attend, backend="aot_eager", fullgraph=True)
    call = Call(q, k, k, 0.3, visibility)
    want = cuda_sdpa.attend(call)
    assert torch.allclose(run(call), want, atol=1e-5)
    asked = dispatch_table.PLAIN._replace(shared=4 // groups, lone=queries == 1, square=queries > 1)
    asked = asked._replace(causal=queries > 1)
    assert self_test.failure(cuda_sdpa, asked) is None
    wrong = SimpleNamespace(attend=lambda call: cuda_sdpa.attend(call) * 1.01)
    assert "o is off" in self_test.failure(wrong, asked)


SHAPE = (2, 3, 40, 8)


def _like(x, q):
    """x in the memory order of q, as cuDNN's outputs are."""
    order = sorted(range(4), key=lambda axis: -q.stride(axis))
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@pytest.fixture
def plans(monkeypatch):
    """cuDNN's plans as PyTorch keeps them, by the strides of q, k and v alone.

    A plan reads o and its gradient with its first strides, wrongly on an H100 (docs/log.md).
    """
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

    library = torch.library.Library("aten", "IMPL")  # over the file's stand-ins
    override = partial(library.impl, dispatch_key="CPU", allow_override=True)
    override("_scaled_dot_product_cudnn_attention", forward)
    override("_scaled_dot_product_cudnn_attention_backward", backward)
    monkeypatch.setattr(cuda_cudnn, "refuses", lambda request: None)
    kernel = dispatch.KERNELS["cudnn"]._replace(device="cpu")
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
    eager = lambda q, k, v: attend(q, k, v, sink=sink, kernel="cudnn")  # noqa: E731
    runs = eager, torch.compile(eager, backend=backend, fullgraph=True)
    for run, values, gradient in itertools.product(runs, (False, True), (False, True)):
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
    inputs = (*(torch.randn(SHAPE) for _ in range(5)), torch.randn(SHAPE[:3]), 0.3, True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(cuda_cudnn._gradients, inputs, test_utils=checks)
