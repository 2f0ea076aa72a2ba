"""`ops.attend` against the float64 oracle: outputs and every gradient, on both of its kernels."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops import attend, tiles
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import SINKS, agree, compare

KERNELS = ["cpu-flash", "tiles"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [None, 0.0, "a head"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("length", [1, 63, 257])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_matches_oracle(kernel, sink, causal, length, padded, use):
    use(kernel)
    mask = None
    if padded:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, : length // 3] = False  # left padding: its causal rows see no key at all
        mask[1, length - length // 4 :] = False
    compare(queries=length, sink=sink, causal=causal, key_mask=mask, padding_counts=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
@pytest.mark.parametrize("spread", [0.3, 8.0], ids=["low", "high"])
def test_matches_oracle_in_each_dtype(kernel, dtype, sink, spread, use):
    use(kernel)
    compare(queries=131, width=16, dtype=dtype, spread=spread, sink=sink)


SHAPES = {
    "values narrower": {"queries": 37, "value": 3},
    "values wider": {"queries": 37, "value": 16, "groups": 4},
    "last query": {"queries": 1, "keys": 12, "causal": True},
    "last queries": {"queries": 130, "keys": 141, "causal": True},
    # Gradients that are not taken in float32.
    "bfloat16, longer": {"queries": 300, "width": 16, "dtype": torch.bfloat16},
    "float16, longer": {"queries": 300, "width": 16, "dtype": torch.float16},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, use):
    if "dtype" in shape:
        use("cpu-flash")
    compare(sink=0.0, **shape)


@pytest.mark.parametrize("kernel", KERNELS)
def test_softmax1_with_logits_far_below_zero(kernel, use):
    """Where the sink takes nearly all the weight, a kernel that ignores it is off by e^40."""
    use(kernel)
    q, v = torch.randn(2, 2, 4, 17, 8, dtype=torch.float64)
    k = -40 * q / q.pow(2).sum(-1, keepdim=True) * 8**0.5  # every query's own logit: −40
    compare(numbers=[q, k, v], sink=0.0)
    assert 0 < attend(q, k, v, sink=0.0)[:, :, 0].abs().max() < 1e-16
    assert attend(q, k, v)[:, :, 0].abs().max() > 0.1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [None, 0.0], ids=["softmax", "softmax1"])
def test_a_row_without_keys_is_zero_and_never_nan(kernel, sink, use):
    use(kernel)
    inputs = [torch.randn(2, n, 5, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    out = attend(*inputs, sink=sink, key_mask=torch.tensor([[False] * 5, [True] * 5]))
    assert (out[0] == 0).all()
    assert out[1].abs().min() > 0
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()
        assert (gradient[0] == 0).all()


def test_hidden_keys_with_enormous_logits_do_not_leak():
    q, k, v = (torch.randn(2, 4, 9, width, dtype=torch.float64) for width in (8, 8, 12))
    k[:, :, 0] *= 1e5
    mask = torch.arange(9).expand(2, -1) > 0
    compare(numbers=[q, k, v], padding_counts=True, key_mask=mask)


def test_autocast_does_not_round_the_scores():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(queries=130, width=16, value=20, dtype=torch.float32, spread=8.0, sink=0.0)


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
        ({"window": 0}, "at least 1 key"),
        *(
            ({"q": torch.randn(2, 4, 6, 8), "causal": False, **hiding}, "needs at least 6 keys")
            for hiding in ({"window": 2}, {"segments": torch.ones(2, 5)})
        ),
        *(
            ({"prefix": tuple(torch.randn(2, *shape) for shape in shapes)}, "a prefix is keys")
            for shapes in (((1, 2, 8), (4, 2, 8)), ((4, 2, 8), (4, 2, 3)), ((4, 0, 8), (4, 2, 8)))
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
@pytest.mark.parametrize("prefix", [0, 2], ids=["alone", "prefixed"])
@pytest.mark.parametrize("scale", [-0.5, 0, 0.0])
def test_scales_of_any_sign(scale, prefix, kernel):
    lone = kernel == "products"
    compare(
        queries=1 if lone else 7, keys=7, dtype=torch.bfloat16 if lone else torch.float32,
        prefix=prefix, scale=scale, kernel=kernel, least=1.0, times=1.5 if lone else 4,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_queries_than_keys_see_all_of_them(kernel):
    q, k, v = (torch.randn(2, n, t, 8) for n, t in ((4, 3 * tiles.ROWS), (2, 5), (2, 5)))
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    compare(numbers=[q, k, v], kernel=kernel, causal=False, key_mask=mask, padding_counts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [None, 0.0, "a head"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_lone_query(dtype, sink, groups, padded, use):
    use("products")
    mask = None
    if padded:
        mask = torch.arange(130).expand(2, -1) >= torch.tensor([[0], [130]])  # a row without keys
    compare(
        groups=groups, queries=1, keys=130, value=16, dtype=dtype, sink=sink, key_mask=mask,
        padding_counts=True,
    )  # fmt: skip


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_lone_query_of_both_maps(sink, groups, padded):
    q, k, v = (torch.randn(2, h, t, 8).double() for h, t in ((8, 1), (groups, 30), (groups, 30)))
    inputs = [q, k, v, torch.tensor(0.3).double()]
    if isinstance(sink, str):
        inputs.append(torch.randn((8,) if sink == "a head" else (2, 8, 1)).double())
    inputs = [x.requires_grad_() for x in inputs]
    options = {"norm_weight": None, "norm_eps": 1e-2, "gain": 0.6}
    options["sink"] = inputs[4] if isinstance(sink, str) else sink
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


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("window", [1, 100, 128, 130, 401])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_windows_match_the_oracle(window, sink, causal):
    options = {"value": 6, "window": window, "causal": causal, "sink": sink, "least": 1.0}
    for queries, keys in ((300, 300), (1, 300), (140, 300), (3, 60))[: 4 if causal else 3]:
        compare(queries=queries, keys=keys, **options)


@pytest.mark.parametrize(("window", "sink"), [(37, 0.0), (None, 0.0), (None, None)])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_documents(make_masks, window, sink, padding, packed):
    options = {"value": 6, "window": window, "sink": sink, "padding_counts": True, "least": 1.0}
    for queries in (300, 140, 1):
        compare(queries=queries, keys=300, **options, **make_masks(300, padding, packed))


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
