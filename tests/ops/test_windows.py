"""`attend(window=)` and `attend(prefix=)` against the float64 oracle, and what windows cost."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import ops
from clearhead.ops import attend, tiles
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import SINKS, agree, compare


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("window", [1, 100, 128, 130, 401])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_matches_oracle(window, sink, causal):
    for queries, keys in ((300, 300), (1, 300), (140, 300), (3, 60))[: 4 if causal else 3]:
        compare(
            queries=queries, keys=keys, value=6, window=window, causal=causal, sink=sink, least=1.0
        )


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_documents(make_masks, padding, packed):
    for queries, keys in ((300, 300), (140, 300), (1, 300)):
        masks = make_masks(keys, padding, packed)
        compare(
            queries=queries, keys=keys, value=6, window=37, sink=0.0, padding_counts=True,
            least=1.0, **masks,
        )  # fmt: skip


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


PADDING = torch.tensor([[False] * 3 + [True] * 6, [True] * 7 + [False] * 2])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiles"])
@pytest.mark.parametrize("sink", [None, 0.0, "a head"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("mask", [None, PADDING], ids=["whole", "padded"])
def test_a_prefix_is_keys_beside_the_others(kernel, sink, number, causal, mask):
    compare(value=6, prefix=number, sink=sink, kernel=kernel, causal=causal, key_mask=mask)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3},
        {"segments": SEGMENTS},
        {"window": 2, "key_mask": PADDING},
        {"sink": 0.0, "queries": 1, "keys": 9, "key_mask": PADDING},
        {"sink": 0.0, "queries": 4, "keys": 9, "key_mask": PADDING},
        {"dtype": torch.float32, "times": 4},
        {"dtype": torch.bfloat16, "times": 1.5},
    ],
    ids=lambda options: ", ".join(options),
)
def test_no_window_document_cache_or_dtype_hides_it(options):
    compare(value=6, prefix=2, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("mask", [None, PADDING, ~torch.ones_like(PADDING)], ids=str)
@torch.no_grad()
def test_a_lone_query_without_gradients(dtype, number, mask):
    """A row that sees no key of the text gets the prefix alone."""
    shapes = (4, 1, 8), (2, 9, 8), (2, 9, 6), (2, number, 8), (2, number, 6)
    q, k, v, *prefix = (torch.randn(2, *shape).to(dtype) for shape in shapes)
    got = attend(q, k, v, prefix=tuple(prefix), key_mask=mask)
    exact = [x.double() for x in (q, k, v, *prefix)]
    want = oracles.attend(*exact[:3], prefix=tuple(exact[3:]), key_mask=mask)
    assert got.dtype == dtype
    assert (got - want).abs().max() < (1e-12 if dtype == torch.float64 else 4e-2)


def test_both_maps_of_differential_attention_have_their_window_their_sink_and_their_prefix():
    inputs = [
        torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
        for shape in ((8, 150, 4), (4, 150, 4), (4, 150, 4), (4, 2, 4), (4, 2, 4))
    ]
    sink = torch.randn(2, 8, 150, dtype=torch.float64, requires_grad=True)
    gains = {"norm_weight": torch.rand(8).double(), "norm_eps": 1e-5, "gain": 0.4}
    lams = torch.tensor(0.3).double(), torch.rand(2, 4, 150, 1).double()
    for name, lam, more in (("differential", lams[0], gains), ("differential_v2", lams[1], {})):
        q, k, v, *prefix = inputs
        for options, used in (
            ({"prefix": tuple(prefix)}, inputs),
            ({"window": 40, "sink": sink}, [q, k, v, sink]),
        ):
            got, want = (getattr(f, name)(q, k, v, lam, **more, **options) for f in (ops, oracles))
            agree(got, want, used, bound=1e-6)
