"""`attend(window=)` against the float64 oracle, and what it costs."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops import cpu_flash, oracles, tiles
from clearhead.ops.visibility import Visibility

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
    grad = torch.randn_like(want)
    found, expected = ([o, *torch.autograd.grad(o, inputs, grad)] for o in (got, want))
    for name, a, b in zip(("o", "dq", "dk", "dv", "dsink"), found, expected, strict=False):
        assert (a - b).abs().max() < 1e-12 * b.abs().max().clamp_min(1), name


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


@pytest.mark.parametrize("sink", [SINKS["by query"]], ids=["by query"])
def test_a_logit_for_each_query_without_a_window(sink):
    _compare(33, 33, 33, sink)
    _compare(5, 33, 33, sink)


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
        assert torch.allclose(got, want, atol=1e-12)
        assert torch.equal(count.expand_as(counted), counted)
        weight = torch.randn_like(want)
        ours, theirs = (torch.autograd.grad((m * weight).sum(), x)[0] for m in (got, want))
        assert torch.allclose(ours, theirs, atol=1e-12)


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


@pytest.mark.parametrize(("queries", "window"), [(64, 64), (64, 500), (1, 64), (1, 7)])
def test_where_no_window_bites_the_stock_kernel_serves(queries, window, monkeypatch):
    taken = []
    for kernel in (cpu_flash, tiles):
        forward = kernel.forward
        monkeypatch.setattr(
            kernel, "forward", lambda *a, k=kernel, f=forward, **o: taken.append(k) or f(*a, **o)
        )
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 64, 8)
    got = ops.attend(q, k, k, window=window)
    assert taken == [cpu_flash]
    assert torch.allclose(got, oracles.attend(q, k, k, window=window).float(), atol=1e-6)


def test_a_window_of_nothing_is_refused():
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(ClearheadError, match="at least 1 key") as error:
        ops.attend(q, q, q, window=0)
    assert "\n" not in str(error.value)
