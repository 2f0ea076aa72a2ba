"""Norms, differential attention, the loss and Hadamard blocks against their oracles."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops import cross_entropy, differential, differential_v2, linear_cross_entropy
from clearhead.ops.hadamard import block_of, factors, rotate_blocks
from tests.ops import oracles
from tests.ops.agreement import agree


@pytest.mark.parametrize("groups", [8, 3])
def test_differential_v2_refuses_a_pair_on_two_keys(groups):
    q, k = torch.randn(1, 8, 5, 4), torch.randn(1, groups, 5, 4)
    with pytest.raises(ClearheadError, match="an even number of queries to each key head"):
        differential_v2(q, k, k, torch.zeros(1, 4, 5, 1))


def test_differential_keeps_the_difference_in_float32():
    """Subtracting two nearly equal maps in bfloat16 would leave rounding noise only."""
    q = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 9, 8, dtype=torch.bfloat16)
    lam = torch.tensor(0.4)
    options = {"norm_weight": None, "norm_eps": 1e-5, "gain": 1.0}
    got, want = differential(q, k, v, lam, **options), oracles.differential(q, k, v, lam, **options)
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
        linear_cross_entropy(x, weight, target),
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
    run = linear_cross_entropy
    if how == "within a graph":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = run(x, weight, target)
    exact = [x.detach().double().requires_grad_(), weight.detach().double()]
    exact[1].requires_grad_()
    want = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target, reduction="sum")
    agree(got, want, (x, weight), exact, bound=bound)
    with torch.no_grad():
        assert torch.isclose(linear_cross_entropy(x, weight, target).double(), want, rtol=bound)


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
