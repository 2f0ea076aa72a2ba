"""`attend(window=)` and `attend(prefix=)` against the float64 oracle, and what windows cost."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops import attend, differential, differential_v2, tiles
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import agree

SINKS = {"softmax": None, "softmax1": 0.0, "sink": (4,), "by query": (2, 4)}


def _compare(
    queries: int, keys: int, window: int, sink: float | tuple[int, ...] | None, **masks: object
) -> None:
    shapes = [(2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    if isinstance(sink, tuple):
        shape = sink if len(sink) == 1 else (*sink, queries)
        sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        inputs.append(sink)
    q, k, v = inputs[:3]
    options = {"window": window, "sink": sink, **masks}
    got, want = (module.attend(q, k, v, **options) for module in (ops, oracles))
    agree(got, want, inputs, bound=1e-12, least=1.0)


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("window", [1, 2, 100, 128, 130, 300, 401])
def test_matches_oracle(window, sink):
    for queries, keys in ((400, 400), (1, 400), (140, 400), (3, 60)):
        _compare(queries, keys, window, sink)


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("window", [1, 2, 100, 128, 300])
def test_a_window_without_causality_is_two_sided(window, sink):
    for queries, keys in ((300, 300), (140, 300), (1, 300)):
        _compare(queries, keys, window, sink, causal=False)


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_documents(make_masks, padding, packed):
    for queries, keys in ((300, 300), (140, 300), (1, 300)):
        _compare(queries, keys, 37, 0.0, **make_masks(keys, padding, packed))


def test_both_maps_of_differential_attention_have_their_window_and_their_sink():
    q, k, v = (torch.randn(2, heads, 150, 8, dtype=torch.float64) for heads in (4, 4, 4))
    lam, sink = torch.tensor(0.3, dtype=torch.float64), torch.randn(2, 4, 150).double()
    options = {"window": 40, "sink": sink}
    norm = {"norm_weight": None, "norm_eps": 1e-5, "gain": 0.2}
    got, want = (f.differential(q, k, v, lam, **norm, **options) for f in (ops, oracles))
    assert torch.allclose(got, want, atol=1e-6)
    lam = torch.rand(2, 2, 150, 1).double()
    got, want = (f.differential_v2(q, k[:, :1], v[:, :1], lam, **options) for f in (ops, oracles))
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("padding", "packed"), list(itertools.product(["none", "left", "holes"], [False, True]))
)
def test_means_are_over_the_window(make_masks, padding, packed):
    for keys, queries, window in ((300, 300, 37), (53, 20, 5), (300, 300, 200), (9, 9, 20)):
        x = torch.randn(2, 3, keys, 5, dtype=torch.float64, requires_grad=True)
        masks = make_masks(keys, padding, packed)
        got, count = ops.running_mean(x, queries, Visibility(window=window, **masks))
        want, counted = oracles.running_mean(x, queries, window=window, **masks)
        assert torch.equal(count.expand_as(counted), counted)
        agree(got, want, [x], bound=1e-12, least=1.0)


def test_a_value_that_counts_what_it_sees():
    for causal, window in itertools.product((True, False), (None, 1, 4, 9, 20)):
        length = 9
        seen = oracles.visible(length, length, causal=causal, window=window)
        assert Visibility(causal, window).mean_count(length) == seen.sum().item() / length


class _Work(TorchDispatchMode):
    """Multiply-adds of products, and the numbers of the largest tensor."""

    work, largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        if func is torch.ops.aten.bmm.default:
            self.work += out.numel() * args[0].shape[-1]
        return out


def _spent(length: int, window: int | None) -> _Work:
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    segments = torch.zeros(1, length, dtype=torch.int)
    with _Work() as spent:
        ops.attend(q, k, v, window=window, segments=segments).sum().backward()
    return spent


def test_time_and_memory_grow_with_the_window_and_not_with_the_square():
    short, long, whole = _spent(1024, 100), _spent(4096, 100), _spent(4096, None)
    assert 3.9 < long.work / short.work < 4.3
    assert long.work < whole.work / 8
    assert long.largest <= max(4096 * 4 * 4, tiles.ROWS * (100 + tiles.ROWS))
    assert whole.largest == tiles.ROWS * 4096


def test_a_window_of_nothing_is_refused():
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(ClearheadError, match="at least 1 key") as error:
        ops.attend(q, q, q, window=0)
    assert "\n" not in str(error.value)


LENGTH = 9
PADDING = torch.tensor([[False] * 3 + [True] * 6, [True] * 7 + [False] * 2])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])


def _prefixed(number: int = 2, queries: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    shapes = [(4, queries, 8), (2, keys, 8), (2, keys, 6), (2, number, 8), (2, number, 6)]
    return [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _compare_prefixed(
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
    mask = options.get("key_mask")  # what a hidden token itself gets is unspecified
    shown = None if mask is None else mask[:, None, -q.shape[2] :, None]
    bound = 1e-12 if q.dtype == torch.float64 else 2e-5 if q.dtype == torch.float32 else 4e-2
    agree(got, want, inputs, exact, bound=bound, shown=shown)


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
    _compare_prefixed(_prefixed(number), sink, kernel, **options)


@pytest.mark.parametrize(
    "options", [{"window": 3}, {"segments": SEGMENTS}, {"window": 2, "key_mask": PADDING}]
)
def test_no_window_and_no_document_hides_it(options):
    _compare_prefixed(_prefixed(), None, **options)


@pytest.mark.parametrize("queries", [1, 4])
def test_queries_after_a_cache_see_it(queries):
    _compare_prefixed(_prefixed(queries=queries), 0.0, key_mask=PADDING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("mask", [None, PADDING, ~torch.ones_like(PADDING)], ids=str)
@torch.no_grad()
def test_a_lone_query_without_gradients(dtype, number, mask):
    """A row that sees no key of the text gets the prefix alone."""
    q, k, v, *prefix = (x.to(dtype) for x in _prefixed(number, queries=1))
    got = attend(q, k, v, prefix=tuple(prefix), key_mask=mask)
    exact = [x.double() for x in (q, k, v, *prefix)]
    want = oracles.attend(*exact[:3], prefix=tuple(exact[3:]), key_mask=mask)
    assert got.dtype == dtype
    assert (got - want).abs().max() < (1e-12 if dtype == torch.float64 else 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_other_dtypes(dtype):
    _compare_prefixed([x.detach().to(dtype).requires_grad_() for x in _prefixed()], None)


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
        agree(got, want, inputs, bound=1e-11)


def test_another_shape_is_refused_in_a_line():
    q, k, v, keys, values = _prefixed()
    for prefix in ((keys[:, :1], values), (keys, values[..., :3]), (keys[:, :, :0], values)):
        with pytest.raises(ClearheadError, match="a prefix is keys") as error:
            attend(q, k, v, prefix=prefix)
        assert "\n" not in str(error.value)
