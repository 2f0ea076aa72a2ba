"""Fused differential attention V1 in Triton's interpreter, `make kernels`, against the oracle.

On a GPU, `test_gpu.py` runs the kernels compiled.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM, preset
from clearhead.ops import differential, differential_fused, dispatch, oracles, self_test
from clearhead.ops.visibility import Visibility
from tests.ops.launches import Launches

# Where it is asked for and Triton is missing, these fail.
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="`make kernels` runs these; CPU builds of PyTorch lack Triton",
)
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
NAMES = ("o", "dq", "dk", "dv", "dlambda", "dsink")


@pytest.fixture(params=[False, True], ids=["two kernels", "single pass"])
def compare(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`_compare` by either form of the gradients."""
    return partial(_compare, single_pass=request.param)


def _compare(
    *,
    single_pass: bool,
    heads: int = 4,
    groups: int = 4,
    queries: int = 67,
    keys: int | None = None,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    sink: float | str | None = None,
    layout=lambda x: x,
    spread: float = 1.0,
    shift: float = 0.0,
    **seen: object,
) -> None:
    torch.manual_seed(0)
    keys = keys or queries
    shapes = [(2, heads, queries, width), (2, groups, keys, width), (2, groups, keys, width)]
    drawn = [torch.randn(s).mul(spread) for s in shapes]
    if shift:  # of every logit
        drawn[0][..., 0], drawn[1][..., 0] = width**0.5, shift
    inputs = [layout(x.to(dtype)).requires_grad_() for x in drawn]
    inputs.append(torch.tensor(0.37, requires_grad=True))
    if sink == "learned":
        inputs.append(torch.randn(heads, requires_grad=True))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sinks = [x[4] if sink == "learned" else sink for x in (inputs, exact)]
    scale = width**-0.5
    options = {"scale": scale, "visibility": Visibility(**seen), "single_pass": single_pass}
    got = differential_fused.difference(*inputs[:4], sink=sinks[0], **options)
    want = oracles.differential(
        *exact[:4],
        **{"norm_weight": None, "norm_eps": None, "gain": 1.0, "sink": sinks[1], "scale": scale},
        **seen,
    )
    assert got.dtype == dtype
    grad = torch.randn_like(want).to(dtype)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    # A logit is rounded in proportion to its size, and a weight changes by as much.
    rounded = abs(shift) * torch.finfo(torch.float32).eps
    for name, a, b in zip(NAMES, found, expected, strict=False):
        # Sums of much that cancels, λ's gradient above all, may be small beside their terms.
        bound = (BOUND[dtype] + rounded) * (5 if name in ("dlambda", "dsink") else 1)
        size = b.norm().clamp_min(grad.double().norm() / 10)
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= bound * size, name


@pytest.mark.parametrize("queries", [1, 7, 64, 67, 150])
@pytest.mark.parametrize("causal", [True, False])
def test_matches_oracle(compare, queries, causal):
    compare(queries=queries, causal=causal)


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("sink", [None, 0.0, "learned"])
def test_widths_and_sinks(compare, width, sink):
    """128 splits the value's columns, and the maps, over two programs."""
    compare(width=width, sink=sink)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_half_precision(compare, spread):
    """The interpreter multiplies bfloat16 by its bits: only a GPU can show that."""
    compare(dtype=torch.float16, spread=spread, sink="learned")


@pytest.mark.parametrize("shift", [-12.0, 12.0])
def test_logits_far_from_the_sinks(compare, shift):
    """A sink that takes all of a row, and one that takes nothing."""
    compare(shift=shift, sink="learned")


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (12, 4)])
@pytest.mark.parametrize("width", [16, 128])
def test_grouped_queries(compare, heads, groups, width):
    compare(heads=heads, groups=groups, queries=40, width=width, sink="learned")


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_queries_are_the_last_of_the_keys(compare, queries, window):
    compare(queries=queries, keys=90, window=window)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sink", [None, 0.0])
def test_padding_and_documents(compare, make_masks, padding, documents, sink):
    compare(queries=90, sink=sink, **make_masks(90, padding, documents))


def test_a_window_over_documents(compare, make_masks):
    compare(queries=90, window=13, sink="learned", **make_masks(90, "left", True))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ],
    ids=["tokens first", "cut rows", "every second"],
)
def test_strides(compare, layout):
    compare(layout=lambda x: layout(x).detach())


def _learn(**options: object) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    lam = torch.tensor(0.2, requires_grad=True)
    seen = {"scale": 0.25, "visibility": Visibility()}
    o = differential_fused.difference(q, k, v, lam, **seen, **options)
    return o, *torch.autograd.grad(o.sum(), (q, k, v, lam))


def test_an_expanded_gradient_and_the_same_result_every_time():
    runs = _learn(), _learn()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("single_pass", [False, True])
@pytest.mark.parametrize("changes", [{}, {"window": True, "shared": 2}, {"segments": True}])
def test_the_test_on_the_device_passes_the_kernels_and_catches_a_wrong_one(single_pass, changes):
    asked = dispatch._PLAIN._replace(depth=16, width=16, **changes)
    run = partial(differential_fused.difference, single_pass=single_pass)
    assert self_test.differential_failure(run, asked) is None
    wrong = lambda *inputs, **options: run(*inputs, **options) * 1.01  # noqa: E731
    assert "o is off by" in self_test.differential_failure(wrong, asked)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The kernels that are started, by name, and do nothing."""
    from clearhead.ops import differential_kernels

    counts: Counter[str] = Counter()
    for name in ("forward", "backward_rows", "backward_keys", "backward_queries"):
        start = partial(lambda name, *inputs, **constants: counts.update([name]), name)
        monkeypatch.setattr(differential_kernels, name, defaultdict(lambda start=start: start))
    return counts


@pytest.mark.parametrize("single_pass", [False, True])
def test_deterministic_algorithms_are_the_two_kernels(single_pass, started):
    torch.use_deterministic_algorithms(True)
    try:
        _learn(single_pass=single_pass)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(started) == {"forward", "backward_rows", "backward_keys", "backward_queries"}


@pytest.mark.parametrize("kernel", dispatch.FUSED)
def test_a_pass_starts_few_kernels(kernel, started):
    """With documents, padding and learned sinks; the documentation has them as `test_launches`."""
    q, k, v = (torch.randn(2, 40, 4, 16).half().transpose(1, 2).requires_grad_() for _ in range(3))
    lam, sink = torch.tensor(0.2, requires_grad=True), torch.zeros(4, requires_grad=True)
    at = torch.arange(40).expand(2, -1)
    seen = Visibility(key_mask=at > 4, segments=at // 20)
    options = {"scale": 0.25, "visibility": seen, "single_pass": kernel == dispatch.SINGLE_PASS}
    with Launches() as forward:
        o = differential_fused.difference(q, k, v, lam, sink=sink, **options)
    counts = [forward.names.total() + started.total()]
    grad = torch.randn_like(o)
    started.clear()
    with Launches() as backward:
        torch.autograd.grad(o, (q, k, v, lam, sink), grad)
    counts.append(backward.names.total() + started.total())
    row = f"| V1, documents, padding, learned sinks | `{kernel}` | {counts[0]} | {counts[1]} |"
    print(row)
    assert counts[0] <= 6
    assert counts[1] <= 8
    assert row in PAGE.read_text("utf-8")


@pytest.mark.parametrize("kernel", dispatch.FUSED)
def test_compiled_in_one_graph(kernel, monkeypatch):
    """The choice, and the test on the device, are no part of it."""
    torch._dynamo.reset()
    monkeypatch.setattr(differential_fused, "refuses", lambda *request: None)
    q, lam = torch.randn(1, 4, 23, 16, requires_grad=True), torch.tensor(0.3, requires_grad=True)

    def run(q: Tensor, lam: Tensor) -> Tensor:
        norm = {"norm_weight": None, "norm_eps": 1e-6, "gain": 0.5}
        return differential(q, q.sin(), q.cos(), lam, kernel=kernel, **norm)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    runs = []
    for job in (compiled, run):
        o = job(q, lam)
        runs.append((o, *torch.autograd.grad(o.square().sum(), (q, lam))))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*runs, strict=True))


def test_the_operators_keep_pytorch_s_contract():
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    lam = torch.tensor(0.2, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    for single_pass in (False, True):
        rest = (None, None, True, 20, 0.25, single_pass)
        torch.library.opcheck(differential_fused._forward, (q, k, v, lam, sink, *rest))


@pytest.mark.parametrize("changes", [{}, {"normalizer": "sink"}])
def test_a_model_learns_the_same_from_the_kernels(changes, monkeypatch):
    """With padding; and only where the environment names them."""
    changes = changes | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    changes |= {"intermediate_size": 32, "vocab_size": 31}
    model = ClearheadForCausalLM(preset("differential", **changes)).train()
    ids, mask = torch.randint(0, 31, (2, 25)), torch.ones(2, 25, dtype=torch.long)
    mask[0, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def run() -> list[Tensor]:
        loss = model(ids, attention_mask=mask, labels=labels).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    want = run()
    calls = []
    difference = differential_fused.difference
    monkeypatch.setattr(
        differential_fused, "difference", lambda *a, **o: calls.append(o) or difference(*a, **o)
    )
    monkeypatch.setattr(differential_fused, "refuses", lambda *request: None)
    run()
    assert not calls
    for name in dispatch.FUSED:
        monkeypatch.setenv(dispatch.VARIABLE, name)
        got = run()
        # A layer each, and once before them the test on the device.
        assert len(calls) in (2, 3)
        assert {call["single_pass"] for call in calls} == {name == dispatch.SINGLE_PASS}
        calls.clear()
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-4 * max(b.norm(), 1e-2)
