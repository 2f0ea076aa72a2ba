"""Differential attention, the loss, Hadamard blocks and means; the table of kernels."""

import logging
from pathlib import Path

import pytest
import torch

from benchmarks import dispatch_table
from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops import attend, cross_entropy, dispatch, precision, self_test, tiles
from clearhead.ops.hadamard import block_of, factors, rotate_blocks
from clearhead.ops.running_mean import WAYS, fastest, running_sum
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import agree


@pytest.mark.parametrize("groups", [8, 3])
def test_differential_v2_refuses_a_pair_on_two_keys(groups):
    q, k = torch.randn(1, 8, 5, 4), torch.randn(1, groups, 5, 4)
    with pytest.raises(ClearheadError, match="an even number of queries to each key head"):
        ops.differential_v2(q, k, k, torch.zeros(1, 4, 5, 1))


def test_differential_keeps_the_difference_in_float32():
    """Subtracting two nearly equal maps in bfloat16 would leave rounding noise only."""
    q = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 9, 8, dtype=torch.bfloat16)
    lam = torch.tensor(0.4)
    options = {"norm_weight": None, "norm_eps": 1e-5, "gain": 1.0}
    got, want = (
        ops.differential(q, k, v, lam, **options),
        oracles.differential(q, k, v, lam, **options),
    )
    assert (got.double() - want).abs().max() < 4e-2 * want.abs().max()


@pytest.mark.parametrize("rows", [5, 1024, 1500])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_linear_cross_entropy(rows, dtype, bound):
    x = torch.randn(rows, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    weight.requires_grad_()
    target = torch.randint(0, 11, (rows,))
    target[::3] = -100
    exact = [x.detach().double().requires_grad_(), weight.detach().double()]
    exact[1].requires_grad_()
    got, want = (
        ops.linear_cross_entropy(x, weight, target),
        oracles.linear_cross_entropy(*exact, target),
    )
    agree(got, want, (x, weight), exact, bound=bound)


@pytest.mark.parametrize("rows", [5, 700])
@pytest.mark.parametrize("how", ["eager", "compiled", "within a graph"])
def test_the_loss_of_a_gpu(rows, how, monkeypatch):
    """Its operator, which knows no device: PyTorch's loss and both gradients."""
    torch._dynamo.reset()
    chunk = torch.compile(cross_entropy._chunk, backend="aot_eager")
    monkeypatch.setattr(cross_entropy, "_compiled", lambda: chunk if how == "compiled" else None)
    monkeypatch.setattr(cross_entropy, "LOGITS", 256 * 11)
    monkeypatch.setattr(cross_entropy, "_by_chunks", _as_on_cuda(cross_entropy._by_chunks))
    bound = 1e-5
    x = torch.randn(rows, 6, requires_grad=True)
    weight, target = torch.randn(11, 6, requires_grad=True), torch.randint(0, 11, (rows,))
    target[::3] = -100
    run = ops.linear_cross_entropy
    if how == "within a graph":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = run(x, weight, target)
    exact = [x.detach().double().requires_grad_(), weight.detach().double()]
    exact[1].requires_grad_()
    want = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target, reduction="sum")
    agree(got, want, (x, weight), exact, bound=bound)
    with torch.no_grad():
        assert torch.isclose(ops.linear_cross_entropy(x, weight, target).double(), want, rtol=bound)


def _as_on_cuda(chunks):
    """`_by_chunks` of a CPU, which goes by the operator, and the operator's own."""

    def run(*inputs):
        return cross_entropy._on_cuda(*inputs) if len(inputs) == 5 else chunks(*inputs)

    return run


def test_the_loss_of_a_gpu_keeps_pytorch_s_contract():
    x, weight, target = torch.randn(9, 6), torch.randn(11, 6), torch.randint(0, 11, (9,))
    for learning in (True, False):
        torch.library.opcheck(cross_entropy._on_cuda, (x, weight, target, -100, learning))


@pytest.mark.parametrize(
    ("width", "block"), [(1, 1), (6, 2), (24, 8), (64, 64), (1536, 512), (2048, 512)]
)
def test_blocks_are_turned_by_sylvester_s_matrix_and_turned_back(width, block):
    assert block_of(width) == block
    matrices = [each.double() for each in factors(block)]
    x = torch.randn(2, 3, width, dtype=torch.float64)
    turned = rotate_blocks(x, *matrices)
    assert torch.allclose(turned, oracles.rotate_blocks(x, block), atol=1e-12)
    assert torch.allclose(rotate_blocks(turned, *matrices), x, atol=1e-12)
    if block > 1:
        one = torch.zeros(width, dtype=torch.float64)
        one[0] = block**0.5
        assert torch.allclose(rotate_blocks(one, *matrices)[:block].abs(), torch.ones(1).double())


def test_the_gradient_is_turned_back():
    """In blocks of an odd power of two, whose factors differ, of rows that lie apart in memory."""
    matrices = [each.double() for each in factors(8)]
    x = torch.randn(24, 3, dtype=torch.float64, requires_grad=True).mT
    grad = torch.randn(3, 24, dtype=torch.float64)
    (found,) = torch.autograd.grad(rotate_blocks(x, *matrices), x, grad)
    assert torch.allclose(found, oracles.rotate_blocks(grad, 8), atol=1e-12)
    assert rotate_blocks(x[:0], *matrices).shape == (0, 24)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_mean_is_the_matrix_s(make_masks, causal, padding, packed):
    whole = [(*shape, None) for shape in ((1, 1), (7, 7), (16, 16), (53, 53), (53, 1), (53, 20))]
    windows = [(300, 300, 37), (53, 20, 5), (300, 300, 200), (9, 9, 20)]
    for keys, queries, window in whole + windows * causal:
        x = torch.randn(2, 3, keys, 5, dtype=torch.float64, requires_grad=True)
        masks = make_masks(keys, padding, packed)
        mean, count = ops.running_mean(x, queries, Visibility(causal, window, **masks))
        masks |= {"causal": causal, "window": window}
        want, want_count = oracles.running_mean(x, queries, **masks)
        assert torch.equal(count.expand_as(want_count), want_count)
        agree(mean, want, [x], bound=1e-12, least=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_comes_in(dtype):
    x = torch.randn(1, 1, 2051, 3).to(dtype)
    for queries in (2051, 1):
        mean, _ = ops.running_mean(x, queries)
        want, _ = oracles.running_mean(x, queries)
        assert mean.dtype == torch.float32
        assert (mean - want).abs().max() < 2e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 31, 32, 100, 256])
def test_every_way_of_summing_gives_the_same(way, length):
    """Also the ways that only a GPU or a compiler takes: in float64, with the gradient."""
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    sums = running_sum(x, way)
    want = torch.ones(length, length, dtype=torch.float64).tril() @ x
    agree(sums, want, [x], bound=1e-12)


def test_the_way_is_the_device_s(monkeypatch):
    here, elsewhere = torch.ones(1, 1, 40, 2), torch.ones(1, 1, 40, 2, device="meta")
    ways = [fastest(x) for x in (here[:, :, :16], here, elsewhere)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [*ways, fastest(here), fastest(elsewhere)] == [
        *("scan", "products", "blocks"),
        *("unrolled", "scan"),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_summing_is_rounded_by_autocast(way):
    x = torch.randn(1, 1, 2051, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        sums = running_sum(x, way)
    assert sums.dtype == torch.float32
    assert (sums - x.double().cumsum(2)).abs().max() < 1e-4
    (gradient,) = torch.autograd.grad(sums.sum(), x)
    assert torch.equal(gradient[0, 0, :, 0], torch.arange(2051.0, 0, -1))


def test_what_is_hidden_may_be_anything():
    x = torch.randn(1, 1, 9, 2)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, :2] = False
    x[:, :, :2] = torch.nan
    mean, count = ops.running_mean(x, 9, Visibility(key_mask=mask))
    assert mean.isfinite().all()
    assert (mean[:, :, :2] == 0).all()
    assert count[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("length", [1, 7, 63, 129])
@pytest.mark.parametrize(
    ("x", "o"), [(torch.float64, torch.float64), (FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=str
)
def test_shaped_over_the_running_mean(length, x, o):
    """Output and every gradient; gains are in the dtype of x."""
    torch.manual_seed(length)
    inputs = [torch.randn(2, length, 3, 20).to(dtype) for dtype in (x, o)]
    inputs += [torch.randn(3, dtype=x) for _ in range(3)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def run(source, x, o, alpha, beta, gamma):
        mean, _ = source.running_mean(x.transpose(1, 2), length)
        return x, o, mean.transpose(1, 2), alpha, beta, gamma

    got = ops.shaped(*run(ops, *inputs))
    own, out, mean, *gains = run(oracles, *exact)
    alpha, beta, gamma = (gain[:, None] for gain in gains)
    want = alpha * own + beta * out - gamma * mean
    assert got.dtype == x
    bound = {torch.float64: 1e-12, FP32: 3e-6, BF16: 8e-3}[o]
    agree(got, want, inputs, exact, bound=2 * bound)


@pytest.mark.parametrize("lacking", ["a compiler", "Python's headers", "Triton", "nothing"])
def test_where_no_kernel_can_start_the_plain_paths_serve(lacking, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    found = {
        "a compiler": (precision.shutil, "which", lambda _name: None),
        "Python's headers": (precision.sysconfig, "get_config_var", lambda _name: None),
        "Triton": (precision.importlib.util, "find_spec", lambda _name: None),
    }
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(precision.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(precision.sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name)
    if lacking in found:
        monkeypatch.setattr(*found[lacking])
    assert precision._startable() == (lacking == "nothing")


CPU = dispatch_table.PLAIN
HOPPER = CPU._replace(device="cuda", ordinal=0, capability=(9, 0), dtype=torch.bfloat16)


class _Wrong:
    """Tiles whose log-sum-exp is to base 2, as some kernels have it."""

    backward = staticmethod(tiles.backward)

    @staticmethod
    def forward(call):
        o, lse = tiles.forward(call)
        return o, lse * 1.4427


def test_the_documentation_has_the_table_of_the_code():
    page = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    assert dispatch_table.markdown() in page


def test_a_kernel_that_fails_its_test_on_the_device_is_passed_over_and_the_reason_kept():
    choice = dispatch.resolve(HOPPER, failure=lambda kernel, request: "dq is off")
    assert choice.name == "tiles"
    assert choice.refusals["cudnn"] == choice.refusals["efficient"] == "dq is off"


@pytest.mark.parametrize("changes", [{}, {"key_mask": True, "segments": True}, {"window": True}])
@pytest.mark.parametrize("shape", [{}, {"square": False}, {"lone": True, "square": False}])
def test_the_test_on_the_device_passes_what_is_right_and_catches_what_is_not(changes, shape):
    request = CPU._replace(shared=2, width=96, **changes, **shape)
    assert self_test.failure(tiles, request) is None
    assert "off by" in self_test.failure(_Wrong, request)


def test_a_kernel_that_raises_fails_its_test():
    class Raising:
        @staticmethod
        def forward(call):
            raise RuntimeError("no plan\nat all")

    assert self_test.failure(Raising, CPU) == "it failed: no plan"


def test_the_test_leaves_random_numbers_and_surroundings_alone():
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert self_test.failure(tiles, CPU) is None
    assert torch.equal(state, torch.get_rng_state())


def test_an_argument_or_the_environment_names_kernels_in_order(monkeypatch, caplog):
    q = torch.randn(1, 2, 7, 24)
    want = oracles.attend(q, q, q).float()
    with caplog.at_level(logging.INFO, "clearhead.ops.dispatch"):
        for _ in range(2):
            assert torch.allclose(attend(q, q, q, kernel="flash,tiles"), want, atol=1e-5)
    (line,) = caplog.messages  # once
    assert line.endswith("square, causal, kind plain: tiles (not flash: it runs on cuda)")
    monkeypatch.setenv(dispatch.VARIABLE, "cudnn")
    with pytest.raises(ClearheadError, match=r"cudnn: it runs on cuda.*name tiles too") as error:
        attend(q, q, q)
    assert "\n" not in str(error.value)
    monkeypatch.setenv(dispatch.VARIABLE, "flsh")
    with pytest.raises(ClearheadError, match="did you mean flash"):
        attend(q, q, q)
    assert torch.allclose(attend(q, q, q, kernel="tiles"), want, atol=1e-5)


def test_unrotated_keys_have_a_kernel_on_a_cpu_and_one_on_a_gpu():
    asked = CPU._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked) == ("products", {})
    learning = {"products": "it has no gradient"}
    assert dispatch.resolve(asked._replace(learning=True)) == ("", learning)
    asked = HOPPER._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked).name == "split-decode"
    refused = dispatch.resolve(asked, failure=lambda kernel, request: "o is off")
    assert refused.name == ""
    assert refused.refusals["split-decode"] == "o is off"
    assert dispatch.resolve(asked._replace(learning=True)).refusals["split-decode"]
