"""`ops.attend` against the float64 oracle: outputs and every gradient, on both of its kernels."""

import pytest
import torch
from torch import Tensor

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops import attend, oracles, tiles
from tests.ops.agreement import agree

# Bounds on the error relative to the largest entry: the rounding of the inputs' dtype, a few times.
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _inputs(
    *,
    heads: int = 4,
    groups: int = 2,
    queries: int = 9,
    keys: int | None = None,
    width: int = 8,
    value: int | None = None,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> list[Tensor]:
    keys = keys or queries
    q = torch.randn(2, heads, queries, width) * spread
    k = torch.randn(2, groups, keys, width)
    v = torch.randn(2, groups, keys, value or width)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def _use(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr("clearhead.ops.attention.select_kernel", lambda *_, **__: kernel)


def _compare(inputs: list[Tensor], sink: float | Tensor | None, **options: object) -> None:
    dtype = inputs[0].dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_sink = sink
    if isinstance(sink, Tensor):
        inputs = [*inputs, sink]
        exact_sink = sink.detach().double().requires_grad_()
        exact.append(exact_sink)
    got = attend(*inputs[:3], sink=sink, **options)
    assert got.dtype == dtype
    want = oracles.attend(*exact[:3], sink=exact_sink, **options)
    agree(got, want, inputs, exact, bound=BOUND[dtype])


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("length", [1, 7, 63, 129, 257])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_matches_oracle(kernel, sink, causal, length, padded, monkeypatch):
    _use(monkeypatch, kernel)
    inputs = _inputs(queries=length)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink == "learned" else sink
    mask = None
    if padded:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, : length // 3] = False  # left padding: its causal rows see no key at all
        mask[1, length - length // 4 :] = False
    _compare(inputs, sink, causal=causal, key_mask=mask)


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
@pytest.mark.parametrize("spread", [0.3, 8.0], ids=["low", "high"])
def test_matches_oracle_in_each_dtype(kernel, dtype, sink, spread, monkeypatch):
    _use(monkeypatch, kernel)
    _compare(_inputs(queries=131, width=16, dtype=dtype, spread=spread), sink)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_oracle_where_gradients_are_not_taken_in_float32(dtype, monkeypatch):
    _use(monkeypatch, "cpu-flash")
    _compare(_inputs(queries=300, width=16, dtype=dtype), 0.0)


@pytest.mark.parametrize("value", [3, 16])
@pytest.mark.parametrize("groups", [2, 4])
def test_value_width_unlike_key_width(value, groups):
    _compare(_inputs(groups=groups, queries=37, value=value), 0.0)


@pytest.mark.parametrize("queries", [1, 3, 130])
def test_queries_are_the_last_of_the_keys(queries):
    _compare(_inputs(queries=queries, keys=queries + 11), 0.0, causal=True)


@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
def test_segments_see_only_themselves(sink):
    segments = torch.tensor([[0] * 40 + [1] * 70 + [2] * 23, [0] * 133])
    mask = torch.arange(133).expand(2, -1) > torch.tensor([[5], [0]])
    _compare(_inputs(queries=133), sink, segments=segments, key_mask=mask)


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
def test_softmax1_with_logits_far_below_zero(kernel, monkeypatch):
    """Where the sink takes nearly all the weight, a kernel that ignores it is off by e^40."""
    _use(monkeypatch, kernel)
    q, k, v = (x.detach() for x in _inputs(groups=4, queries=17))
    k = (
        -40 * q / q.pow(2).sum(-1, keepdim=True) * q.shape[-1] ** 0.5
    )  # every query's own logit: −40
    inputs = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    _compare(inputs, 0.0)
    first = attend(*inputs, sink=0.0)[:, :, 0]
    assert 0 < first.abs().max() < 1e-16
    assert attend(*inputs)[:, :, 0].abs().max() > 0.1


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
def test_a_row_without_keys_is_zero_and_never_nan(kernel, sink, monkeypatch):
    _use(monkeypatch, kernel)
    inputs = _inputs(queries=5)
    mask = torch.tensor([[False] * 5, [True] * 5])
    out = attend(*inputs, sink=sink, key_mask=mask)
    assert (out[0] == 0).all()
    assert out[1].abs().min() > 0
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()
        assert (gradient[0] == 0).all()


def test_hidden_keys_with_enormous_logits_do_not_leak():
    q, k, v = _inputs(groups=4, queries=9, value=12)
    with torch.no_grad():
        k[:, :, 0] *= 1e5
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 0] = False
    _compare([q, k, v], None, key_mask=mask)


def test_autocast_does_not_round_the_scores():
    inputs = _inputs(queries=130, width=16, value=20, dtype=torch.float32, spread=8.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _compare(inputs, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(2, 3, 5, 8)}, "cannot share 3 key heads"),
        ({"k": torch.randn(2, 4, 5, 6)}, "do not fit"),
        ({"q": torch.randn(2, 4, 5, 8).half()}, "one floating dtype"),
        ({"q": torch.randn(2, 4, 6, 8)}, "needs at least 6 keys"),
        ({"sink": torch.zeros(3)}, "one logit a head"),
        ({"key_mask": torch.ones(2, 5)}, "key_mask must be bool"),
        ({"segments": torch.ones(2, 4)}, "segments must be"),
        *(
            ({"q": torch.randn(2, 4, 6, 8), "causal": False, **hiding}, "needs at least 6 keys")
            for hiding in ({"window": 2}, {"segments": torch.ones(2, 5)})
        ),
    ],
)
def test_misfits_are_refused_in_one_line(change, message):
    arguments = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 4, 5, 8)}
    arguments["v"] = torch.randn(2, change.get("k", arguments["k"]).shape[1], 5, 8)
    arguments |= change
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ClearheadError, match=message) as error:
        attend(q, k, v, **arguments)
    assert "\n" not in str(error.value)


def test_a_second_derivative_is_refused():
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    weight, target = torch.randn(11, 8, requires_grad=True), torch.arange(10)
    loss = ops.linear_cross_entropy(x.reshape(-1, 8), weight, target)
    for result in (attend(x, x, x).sum(), loss):
        with pytest.raises(ClearheadError, match="no second derivative"):
            torch.autograd.grad(result, x, create_graph=True)


@pytest.mark.parametrize("kernel", ["cpu-flash", "products", "tiles"])
@pytest.mark.parametrize("prefixed", [False, True], ids=["alone", "prefixed"])
@pytest.mark.parametrize("scale", [-0.5, 0, 0.0])
def test_scales_of_any_sign(scale, prefixed, kernel):
    lone = kernel == "products"
    dtype, bound = (torch.bfloat16, 2e-2) if lone else (torch.float32, 1e-5)
    q, k, v = _inputs(groups=2, queries=1 if lone else 7, keys=7, value=8, dtype=dtype)
    prefix = (torch.randn(2, 2, 2, 8).to(dtype), torch.randn(2, 2, 2, 8).to(dtype))
    options = {"scale": scale, "prefix": prefix if prefixed else None}
    out, expected = attend(q, k, v, kernel=kernel, **options), oracles.attend(q, k, v, **options)
    agree(out, expected, (q, k, v), bound=2 * bound, least=1.0)


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
def test_more_queries_than_keys_see_all_of_them(kernel):
    q, k, v = _inputs(groups=2, queries=3 * tiles.ROWS, keys=5, value=8, dtype=torch.float32)
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    options = {"causal": False, "key_mask": mask}
    out, expected = attend(q, k, v, kernel=kernel, **options), oracles.attend(q, k, v, **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_lone_query(dtype, sink, groups, padded, monkeypatch):
    _use(monkeypatch, "products")
    sink = torch.randn(4, requires_grad=True) if sink == "learned" else sink
    mask = None
    if padded:
        mask = torch.arange(130).expand(2, -1) >= torch.tensor([[0], [130]])  # a row without keys
    inputs = _inputs(groups=groups, queries=1, keys=130, value=16, dtype=dtype)
    _compare(inputs, sink, key_mask=mask)


@pytest.mark.parametrize("sink", [None, 0.0, "a head", "a query"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_lone_query_of_both_maps(sink, groups, padded):
    q, k, v = (torch.randn(2, h, t, 8).double() for h, t in ((8, 1), (groups, 30), (groups, 30)))
    inputs = [q, k, v, torch.tensor(0.3).double()]
    shape = {"a head": (8,), "a query": (2, 8, 1)}.get(sink)
    if shape is not None:
        inputs.append(torch.randn(shape).double())
    inputs = [x.requires_grad_() for x in inputs]
    options = {"norm_weight": None, "norm_eps": 1e-2, "gain": 0.6}
    options["sink"] = sink if shape is None else inputs[4]
    if padded:
        options["key_mask"] = torch.arange(30).expand(2, -1) >= torch.tensor([[0], [11]])
    got, want = (m.differential(*inputs[:4], **options) for m in (ops, oracles))
    agree(got, want, inputs, bound=1e-12, least=1.0)


def test_autocast_does_not_round_a_lone_query_of_both_maps():
    inputs = [torch.randn(2, h, t, 8) * 3 for h, t in ((8, 1), (4, 30), (4, 30))]
    inputs = [x.requires_grad_() for x in (*inputs, torch.tensor(0.3))]
    options = {"norm_weight": None, "norm_eps": None, "gain": 0.6, "sink": 0.0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.differential(*inputs, **options)
    agree(got, ops.differential(*inputs, **options), inputs, bound=1e-5, least=1.0)
