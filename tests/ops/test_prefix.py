"""Keys and values that every query sees, against the oracle: outputs and every gradient."""

import pytest
import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops import attend, differential, differential_v2, oracles

LENGTH = 9
PADDING = torch.tensor([[False] * 3 + [True] * 6, [True] * 7 + [False] * 2])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])


def _inputs(number: int = 2, queries: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    shapes = [(4, queries, 8), (2, keys, 8), (2, keys, 6), (2, number, 8), (2, number, 6)]
    return [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _compare(
    inputs: list[Tensor], sink: float | Tensor | None, kernel: str | None = None, **options: object
) -> None:
    q, k, v, *prefix = inputs
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_sink = sink
    if isinstance(sink, Tensor):
        exact_sink = sink.detach().double().requires_grad_()
        inputs, exact = [*inputs, sink], [*exact, exact_sink]
    got = attend(q, k, v, sink=sink, prefix=tuple(prefix), kernel=kernel, **options)
    want = oracles.attend(*exact[:3], sink=exact_sink, prefix=tuple(exact[3:5]), **options)
    mask = options.get("key_mask")
    if mask is not None:  # what a hidden token itself gets is unspecified
        shown = mask[:, None, -q.shape[2] :, None]
        got, want = got * shown, want * shown
    grad = torch.randn(want.shape)
    found = [got, *torch.autograd.grad(got, inputs, grad.to(got.dtype))]
    expected = [want, *torch.autograd.grad(want, exact, grad.to(got.dtype).double())]
    bound = 1e-12 if q.dtype == torch.float64 else 2e-5 if q.dtype == torch.float32 else 4e-2
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)
        assert error < bound, f"tensor {index}: {error:.2e}"


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"key_mask": PADDING}, {"causal": False, "key_mask": PADDING}],
    ids=["causal", "full", "padded", "padded and full"],
)
def test_a_prefix_is_keys_beside_the_others(kernel, sink, number, options):
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink == "learned" else sink
    _compare(_inputs(number), sink, kernel, **options)


@pytest.mark.parametrize(
    "options", [{"window": 3}, {"segments": SEGMENTS}, {"window": 2, "key_mask": PADDING}]
)
def test_no_window_and_no_document_hides_it(options):
    _compare(_inputs(), None, **options)


@pytest.mark.parametrize("queries", [1, 4])
def test_queries_after_a_cache_see_it(queries):
    _compare(_inputs(queries=queries), 0.0, key_mask=PADDING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("mask", [None, PADDING, ~torch.ones_like(PADDING)], ids=str)
@torch.no_grad()
def test_a_lone_query_without_gradients(dtype, number, mask):
    """A row that sees no key of the text gets the prefix alone."""
    q, k, v, *prefix = (x.to(dtype) for x in _inputs(number, queries=1))
    got = attend(q, k, v, prefix=tuple(prefix), key_mask=mask)
    exact = [x.double() for x in (q, k, v, *prefix)]
    want = oracles.attend(*exact[:3], prefix=tuple(exact[3:]), key_mask=mask)
    assert got.dtype == dtype
    assert (got - want).abs().max() < (1e-12 if dtype == torch.float64 else 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_other_dtypes(dtype):
    _compare([x.detach().to(dtype).requires_grad_() for x in _inputs()], None)


def test_of_both_differential_forms():
    def numbers(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)

    inputs = [numbers(8, 9, 4), numbers(4, 9, 4), numbers(4, 9, 4), numbers(4, 2, 4)]
    inputs += [numbers(4, 2, 4)]
    weight = torch.rand(8, dtype=torch.float64)
    gains = {"norm_weight": weight, "norm_eps": 1e-5, "gain": 0.4}
    for operation, oracle, lam, options in (
        (differential, oracles.differential, torch.tensor(0.3, dtype=torch.float64), gains),
        (differential_v2, oracles.differential_v2, torch.rand(2, 4, 9, 1).double(), {}),
    ):
        q, k, v, *prefix = inputs
        got = operation(q, k, v, lam, prefix=tuple(prefix), **options)
        want = oracle(q, k, v, lam, prefix=tuple(prefix), **options)
        grad = torch.randn_like(want)
        pairs = zip(
            [got, *torch.autograd.grad(got, inputs, grad)],
            [want, *torch.autograd.grad(want, inputs, grad)],
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).abs().max() < 1e-11 * b.abs().max()


def test_another_shape_is_refused_in_a_line():
    q, k, v, keys, values = _inputs()
    for prefix in ((keys[:, :1], values), (keys, values[..., :3]), (keys[:, :, :0], values)):
        with pytest.raises(ClearheadError, match="a prefix is keys") as error:
            attend(q, k, v, prefix=prefix)
        assert "\n" not in str(error.value)
