"""`attend(by_side=True)` against the float64 oracle: outputs, every gradient, both kernels."""

import pytest
import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops import attend, oracles, stock, tiles

KERNELS = {"stock": stock, "tiles": tiles}
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _inputs(
    *,
    groups: int = 2,
    length: int = 9,
    width: int = 8,
    value: int | None = None,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> list[Tensor]:
    q = torch.randn(2, 4, length, 2 * width) * spread
    k = torch.randn(2, groups, length, 2 * width)
    v = torch.randn(2, groups, length, value or width)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def _use(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    for asks in ("attention", "sides"):
        monkeypatch.setattr(f"clearhead.ops.{asks}.chosen", lambda *_: KERNELS[kernel])


def _compare(inputs: list[Tensor], sink: float | Tensor | None, **options: object) -> None:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_sink = sink
    if isinstance(sink, Tensor):
        inputs = [*inputs, sink]
        exact_sink = sink.detach().double().requires_grad_()
        exact.append(exact_sink)
    options = {"causal": False, "by_side": True, **options}
    got = attend(*inputs[:3], sink=sink, **options)
    want = oracles.attend(*exact[:3], sink=exact_sink, **options)
    grad = torch.randn(want.shape).to(got.dtype)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    assert got.dtype == inputs[0].dtype
    for name, a, b in zip(("o", "dq", "dk", "dv", "dsink"), found, expected, strict=False):
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)
        assert error < BOUND[got.dtype], f"{name}: {error:.2e}"


def _padding(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, : length // 3] = False  # padded rows on the left see nothing earlier,
    mask[1, length - length // 4 :] = False  # and on the right nothing later
    return mask


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("length", [1, 2, 7, 129, 257])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_matches_oracle(kernel, sink, length, padded, monkeypatch):
    _use(monkeypatch, kernel)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink == "learned" else sink
    _compare(_inputs(length=length), sink, key_mask=_padding(length) if padded else None)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [0.3, 8.0], ids=["low", "high"])
def test_matches_oracle_in_each_dtype(kernel, dtype, spread, monkeypatch):
    _use(monkeypatch, kernel)
    _compare(_inputs(length=131, width=16, dtype=dtype, spread=spread), 0.0)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("value", [3, 16])
def test_grouped_queries_and_other_value_widths(groups, value):
    _compare(_inputs(groups=groups, length=33, value=value), 0.0)


@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
def test_segments_see_only_themselves(sink):
    segments = torch.tensor([[0] * 40 + [1] * 70 + [2] * 23, [0] * 133])
    mask = torch.arange(133).expand(2, -1) > torch.tensor([[5], [0]])
    _compare(_inputs(length=133), sink, segments=segments, key_mask=mask)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_side_far_above_the_other(kernel, monkeypatch):
    """Weights of one pass vanish beside the other's, and no exponent overflows."""
    _use(monkeypatch, kernel)
    q, k, v = (x.detach() for x in _inputs(length=17, groups=4))
    q[0, :, :, 0], k[0, :, :, 0] = 15.0, 15.0
    q[1, :, :, 8], k[1, :, :, 8] = 15.0, -15.0
    _compare([x.requires_grad_() for x in (q, k, v)], 0.0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
def test_a_row_without_keys_is_zero_and_never_nan(kernel, sink, monkeypatch):
    _use(monkeypatch, kernel)
    inputs = _inputs(length=5)
    mask = torch.tensor([[False] * 5, [True] * 5])
    out = attend(*inputs, sink=sink, key_mask=mask, causal=False, by_side=True)
    assert (out[0] == 0).all()
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()
        assert (gradient[0] == 0).all()


def test_the_same_vectors_on_both_sides_are_plain_attention():
    q, k, v = _inputs(length=37, width=4)
    plain = attend(q[..., :4], k[..., :4], v, causal=False, sink=0.0)
    twice = [torch.cat([x[..., :4]] * 2, -1) for x in (q, k)]
    assert torch.allclose(attend(*twice, v, causal=False, sink=0.0, by_side=True), plain)


def test_compiled_equals_eager():
    torch._dynamo.reset()
    inputs = _inputs(length=130, width=16, dtype=torch.float32)
    options = {"causal": False, "by_side": True, "sink": 0.0}
    want = attend(*inputs, **options)
    got = torch.compile(attend, fullgraph=True)(*inputs, **options)
    grad = torch.randn_like(want)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, inputs, grad)]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() / b.abs().max() < BOUND[torch.float32]


def test_what_has_no_two_sides_is_refused():
    q, k, v = _inputs(length=5)
    for arguments, options in (
        ((q, k, v), {"causal": True}),
        ((q[:, :, 1:], k, v), {"causal": False}),
        ((q[..., 1:], k[..., 1:], v), {"causal": False}),
    ):
        with pytest.raises(ClearheadError, match="by_side is of a whole text") as error:
            attend(*arguments, by_side=True, **options)
        assert "\n" not in str(error.value)
