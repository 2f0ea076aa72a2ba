"""CUDA's kernels owe the CPU's proof before they are trusted: `make gpu-check`."""

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from benchmarks import dispatch_table
from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.ops import attend, dispatch, running_mean, self_test
from clearhead.ops.dispatch import arguments_of, request
from clearhead.ops.requests import DIFFERENTIAL, PLAIN, UNROTATED, Call
from clearhead.ops.running_mean import WAYS, running_sum
from clearhead.ops.visibility import Visibility
from tests.models.space import CAUSAL
from tests.ops import oracles

pytestmark = pytest.mark.gpu
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
    for number, (masks, shape, causal) in enumerate(product(MASKS, SHAPES, [True, False]))
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
    asked = request(*arguments_of(Call(*inputs, 1.0, visibility), sink=sink))
    return dispatch.KERNELS[kernel].run.refuses(asked)


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


# ‖error‖ / ‖exact‖.
LONE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NORM = {"norm_weight": None, "norm_eps": None, "gain": 1.0}
KINDS = [PLAIN, DIFFERENTIAL, UNROTATED]


def _run(
    kind: str, inputs: list[Tensor], mask: Tensor | None, sink: Tensor | None, exact: bool = False
) -> Tensor:
    """Of two texts; by the table, or, with `exact`, by the oracle."""
    q, k, v = (x.double() for x in inputs) if exact else inputs
    options = {"key_mask": mask, "sink": sink}
    attend = oracles.attend if exact else ops.attend
    if kind == PLAIN:
        return attend(q, k, v, **options)
    if kind == DIFFERENTIAL:
        lam = torch.tensor(0.37, device="cuda")
        return (oracles if exact else ops).differential(q, k, v, lam, **NORM, **options)
    counted = torch.ones(1, k.shape[2], device="cuda") if mask is None else mask
    frequency = 1e4 ** -(torch.arange(0, q.shape[3], 2, device="cuda") / q.shape[3])
    rotation = ops.Rotation(counted.cumsum(-1).long() + 2, frequency)
    scale = q.shape[3] ** -0.5
    if exact:
        k = ops.coca_keys(k, rotation.table(), "exact")
        return oracles.attend(q, k, v, scale=scale, **options)
    visibility = Visibility(True, None, mask, None)
    unrotated = {"rotation": rotation, "form": "exact", "attend": None}
    return ops.attend_unrotated(q, k, v, visibility=visibility, sink=sink, scale=scale, **unrotated)


def _inputs(kind: str, heads: int, groups: int, keys: int, width: int, dtype: torch.dtype):
    torch.manual_seed(0)
    shapes = [(2, heads, 1, width), (2, groups, keys, width), (2, groups, keys, width)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return [q, k[..., : width // 2] if kind == UNROTATED else k, v]


@pytest.mark.parametrize(
    ("number", "case"),
    list(enumerate(product(KINDS, ["whole", "left", "right", "holes"], [1, 67, 4099]))),
)
def test_split_decode_matches_oracle(number, case, monkeypatch):
    """Dtypes, widths and groups take turns."""
    kind, padding, keys = case
    monkeypatch.setenv(dispatch.VARIABLE, "split-decode,tiles")
    monkeypatch.setenv(dispatch.VARIABLE, "split-decode,tiles")
    dtype, width = list(LONE)[number % 3], (32, 64, 128)[number // 3 % 3]
    heads, groups = ((4, 4), (8, 2), (40, 2))[(number + number // 9) % 3]
    inputs, mask = _inputs(kind, heads, groups, keys, width, dtype), _tokens(keys, padding)
    sink = torch.randn(heads, device="cuda")
    if mask is not None:  # what lies in hidden slots does not matter
        hidden = ~mask[:, None, :, None]
        inputs = [inputs[0], *(x.masked_fill(hidden, torch.nan) for x in inputs[1:])]
    got = _run(kind, inputs, mask, sink)
    clean = [x.nan_to_num() for x in inputs]
    want = _run(kind, clean, mask, sink, exact=True)
    assert (got.double() - want).norm() <= LONE[dtype] * want.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", ["whole", "left"])
def test_grouped_queries_copy_no_cache(kind, padding):
    """By the table's own choice; less memory than a tenth of the cache."""
    inputs = _inputs(kind, 32, 4, 16_384, 64, torch.bfloat16)
    mask = _tokens(16_384, padding)
    _run(kind, inputs, mask, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _run(kind, inputs, mask, None)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < sum(x.nbytes for x in inputs[1:]) / 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_follows_its_inputs(kind):
    inputs = _inputs(kind, 8, 2, 300, 64, torch.bfloat16)
    mask = _tokens(300, "left")
    run = lambda: _run(kind, inputs, mask, None)  # noqa: E731
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        run()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run()
    inputs[0].mul_(0.5)
    mask[0, :200] = False
    graph.replay()
    assert torch.equal(o, run())


def _whole(name: str, **keys: int) -> ClearheadForCausalLM:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 97, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **shape | keys)).to("cuda").eval()


def _whole(name: str, **keys: int) -> ClearheadForCausalLM:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 97, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **shape | keys)).to("cuda").eval()


@pytest.mark.parametrize("name", ["transformer", "softmax1", "differential", "coca"])
def test_a_static_cache_generates_the_same_compiled(name):
    """As transformers compiles a step by itself on a GPU; shapes that the table's kernels take."""
    model = _whole(name, num_key_value_heads=2, intermediate_size=64)
    ids = torch.randint(0, 97, (2, 12), device="cuda")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_a_whole_step_in_a_graph(name, padding):
    """Captured once, it serves every later length."""
    model = _whole(name)
    ids = torch.randint(0, 97, (2, 12), device="cuda")
    mask = torch.ones(2, 16, dtype=torch.long, device="cuda")
    mask[1, :padding] = 0
    whole = model(ids, attention_mask=mask[:, :12], use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :5], attention_mask=mask, past_key_values=cache)
    given = {"attention_mask": mask if padding else None, "past_key_values": cache}
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels are chosen and compiled
        model(ids[:, 5:6], **given)
    torch.cuda.current_stream().wait_stream(aside)
    token, graph = ids[:, 6:7].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, **given).logits
    for place in range(6, 12):
        token.copy_(ids[:, place : place + 1])
        graph.replay()
        assert (logits[:, 0] - whole[:, place]).abs().max() <= 1e-3 * whole.abs().max()
