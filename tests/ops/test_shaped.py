"""Shaped attention over its own running mean: the plain path, and the kernels without a GPU.

Triton's interpreter runs the kernels on a CPU: `make kernels`. On a GPU, `test_gpu.py` runs them
compiled.
"""

import os

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.ops import oracles, shaped_fused

# Where it is asked for and Triton is missing, these fail.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="`make kernels` runs these; CPU builds of PyTorch lack Triton",
)
FP32, BF16 = torch.float32, torch.bfloat16
BOUND = {torch.float64: 1e-12, FP32: 3e-6, BF16: 8e-3, torch.float16: 1e-3}


def _inputs(length: int, width: int, x: torch.dtype, o: torch.dtype) -> list[Tensor]:
    """x, o, α, β, γ of two texts and three heads; gains are float32 as under autocast."""
    torch.manual_seed(length + width)
    gain = torch.promote_types(x, FP32)
    inputs = [torch.randn(2, length, 3, width).to(dtype) for dtype in (x, o)]
    inputs += [torch.randn(3, dtype=gain) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in inputs]


def _fused(x: Tensor, o: Tensor, *gains: Tensor) -> Tensor:
    """What `ops.shaped_causal` does on a GPU."""
    return shaped_fused.forward(x.flatten(2), o.flatten(2), *gains).unflatten(-1, x.shape[2:])


def _against_the_oracle(run, inputs):
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    got, want = run(*inputs), oracles.shaped_causal(*exact)
    assert got.dtype == inputs[0].dtype
    assert got.shape == want.shape
    grad = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    for a, b, like in zip(found, expected, (inputs[0], *inputs), strict=True):
        assert a.dtype == like.dtype
        # A gradient of a gain sums over what may have been rounded on the way.
        bound = max(BOUND[t.dtype] for t in inputs) if a.ndim == 1 else BOUND[a.dtype]
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("length", [1, 7, 63, 129])
@pytest.mark.parametrize(
    ("x", "o"), [(torch.float64, torch.float64), (FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=str
)
def test_plain_path(length, x, o):
    inputs = _inputs(length, 20, x, o)
    if x == BF16:  # a model that is bfloat16 throughout
        inputs = [tensor.detach().to(x).requires_grad_() for tensor in inputs]
    _against_the_oracle(ops.shaped_causal, inputs)


@interpreted
@pytest.mark.parametrize("length", [1, 7, 63, 129])
@pytest.mark.parametrize("width", [8, 32, 64, 96, 20])
@pytest.mark.parametrize(
    ("x", "o"), [(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP32, torch.float16)], ids=str
)
def test_kernels(length, width, x, o):
    _against_the_oracle(_fused, _inputs(length, width, x, o))


@interpreted
def test_kernels_take_any_strides():
    """Attention's output comes as [B, H, T, D]; gains, inputs and gradients may be views."""
    x, o, *gains = _inputs(33, 8, FP32, FP32)
    o = o.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    x = x.detach().flip(1).repeat(1, 1, 1, 2)[..., ::2].requires_grad_()
    gains = [gain.detach().repeat_interleave(2)[::2].requires_grad_() for gain in gains]
    _against_the_oracle(_fused, [x, o, *gains])
    (found,) = torch.autograd.grad(_fused(x, o, *gains).sum(), x)  # an expanded gradient
    (want,) = torch.autograd.grad(oracles.shaped_causal(x, o, *gains).sum(), x)
    assert torch.allclose(found, want.to(found.dtype), atol=1e-5)


@interpreted
def test_sums_are_float32_and_the_same_every_time():
    x, o, *gains = _inputs(1000, 8, BF16, BF16)
    with torch.autocast("cpu", BF16):
        runs = [torch.autograd.grad(_fused(x, o, *gains).sum(), [x, o, *gains]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    _against_the_oracle(_fused, [x, o, *gains])


@pytest.mark.parametrize("lacking", ["a compiler", "Python's headers", "Triton", "nothing"])
def test_where_no_kernel_can_start_the_plain_path_serves(lacking, monkeypatch, tmp_path):
    """As in slim images: Triton is there, and what it starts a kernel with is not."""
    (tmp_path / "Python.h").touch()
    found = {
        "a compiler": (shaped_fused.shutil, "which", lambda _name: None),
        "Python's headers": (shaped_fused.sysconfig, "get_config_var", lambda _name: None),
        "Triton": (shaped_fused.importlib.util, "find_spec", lambda _name: None),
    }
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shaped_fused.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(shaped_fused.sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(shaped_fused.importlib.util, "find_spec", lambda name: name)
    if lacking in found:
        monkeypatch.setattr(*found[lacking])
    assert shaped_fused._startable() == (lacking == "nothing")


@interpreted
def test_no_texts():
    x, o, *gains = (tensor.detach() for tensor in _inputs(5, 8, FP32, FP32))
    assert _fused(x[:0], o[:0], *gains).shape == (0, 5, 3, 8)


@interpreted
def test_a_second_derivative_is_refused():
    inputs = _inputs(5, 8, FP32, FP32)
    (once,) = torch.autograd.grad(_fused(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        once.sum().backward()


@interpreted
def test_the_operators_keep_pytorch_s_contract():
    """No hidden mutation, fake tensors that tell the truth, autograd under compilation."""
    for x, o in ((FP32, BF16), (BF16, BF16)):
        x_BTHD, o_BTHD, *gains = _inputs(40, 8, x, o)
        arguments = (x_BTHD.detach().flatten(2), o_BTHD.detach().flatten(2), *gains)
        inputs = tuple(tensor.detach().requires_grad_() for tensor in arguments)
        torch.library.opcheck(shaped_fused.forward, inputs)
        plain = tuple(tensor.detach() for tensor in inputs)
        torch.library.opcheck(shaped_fused.backward, (plain[0] * 2, *plain))


@interpreted
def test_checkpointed_and_compiled():
    inputs = _inputs(40, 8, FP32, BF16)
    compiled = torch.compile(_fused, backend="aot_eager", fullgraph=True)
    _against_the_oracle(compiled, inputs)

    def again(*tensors: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(_fused, *tensors, use_reentrant=False)

    _against_the_oracle(again, inputs)


@interpreted
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_learns_the_same_from_the_kernels(autocast, monkeypatch):
    changes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    changes |= {"intermediate_size": 32, "vocab_size": 31, "query_range": 0.2}
    model = ClearheadForCausalLM(preset("sas", **changes)).train()
    ids = torch.randint(0, 31, (2, 45))

    def run() -> list[Tensor]:
        with torch.autocast("cpu", BF16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    want = run()
    asked = []
    monkeypatch.setattr(
        shaped_fused, "supports", lambda x, o: asked.append((x.dtype, o.dtype)) or True
    )
    got = run()
    assert asked == [(FP32, BF16 if autocast else FP32)] * 2
    largest = max(b.abs().max().item() for b in want[1:])
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= (2e-2 if autocast else 1e-5) * largest
