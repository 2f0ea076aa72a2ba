"""Liger's Triton kernels against ours, compiled: what would make them an extra.

They are none today (docs/performance.md), so they need `pip install liger-kernel`, and a GPU.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race import Ratio, ratio_of
from clearhead import ops
from clearhead.experiments.timing import take_turns
from clearhead.models.loading import best_device
from clearhead.ops.rope import cos_sin

TOKENS, WIDTH, WIDE, VOCABULARY = 16_384, 1024, 2816, 50_000
LENGTH, HEADS = 2048, 16

# Of the same arguments and results: ours, and Liger's.
Sides = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def liger(rounds: int) -> Iterator[Ratio]:
    """Forward and backward of an operation by ours, compiled, of Liger's time; results compared."""
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        print("liger: nothing compared: it needs a GPU and liger-kernel", file=sys.stderr)
        return
    for name, (ours, theirs, inputs) in _operations().items():
        for a, b in zip(*(_results(side, inputs) for side in (ours, theirs)), strict=True):
            error = float((a.float() - b.float()).norm() / a.float().norm())
            if error > 2e-2:
                raise RuntimeError(f"{name}: Liger's result is {error:.1e} of its size from ours")
        compiled = torch.compile(ours)
        seconds = take_turns(
            {
                "ours": lambda run=compiled, x=inputs: _results(run, x),  # type: ignore[misc]
                "Liger": lambda run=theirs, x=inputs: _results(run, x),  # type: ignore[misc]
            },
            rounds,
        )
        yield ratio_of(f"liger, {name}", "ours", "Liger", 1.0, seconds)


def _results(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The output, and the gradients of all inputs of floats."""
    out = function(*inputs)
    learning = [x for x in inputs if x.requires_grad]
    return out, *torch.autograd.grad(out, learning, torch.ones_like(out))


def _operations() -> dict[str, Sides]:
    from liger_kernel import ops as theirs

    x, residual = _drawn(TOKENS, WIDTH), _drawn(TOKENS, WIDTH)
    gain = torch.ones(WIDTH, device=best_device(), requires_grad=True)
    gate, up = _drawn(TOKENS, WIDE), _drawn(TOKENS, WIDE)
    q = _drawn(TOKENS // LENGTH, LENGTH, HEADS, WIDTH // HEADS)
    k = q.detach()[:, :, :1].transpose(1, 2).clone()
    at = torch.arange(LENGTH, device=best_device())[None]
    frequency, _ = ops.frequencies(
        {"rope_type": "default", "rope_theta": 1e4}, WIDTH // HEADS, at.device
    )
    table = ops.rotary_table(at, frequency)
    cos, sin = (torch.cat([x, x], -1)[:, 0] for x in cos_sin(table))
    weight = _drawn(VOCABULARY, WIDTH)
    target = torch.randint(0, VOCABULARY, (TOKENS,), device=best_device())

    def theirs_rotary(q: Tensor) -> Tensor:
        turned: Tensor = theirs.LigerRopeFunction.apply(q.transpose(1, 2), k, cos, sin)[0]
        return turned  # in the memory of q

    def theirs_loss(x: Tensor, weight: Tensor) -> Tensor:
        options: tuple[Any, ...] = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
        total: Tensor = theirs.LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, target, *options
        )[0]
        return total

    def theirs_norm(x: Tensor, gain: Tensor) -> Tensor:
        found: Tensor = theirs.LigerRMSNormFunction.apply(x, gain, 1e-6, 0.0, "gemma", False)
        return found

    return {
        "RMSNorm": (lambda x, gain: ops.rms_norm(x, gain, 1e-6), theirs_norm, [x, gain]),
        "an addition and RMSNorm": (
            lambda x, y, gain: ops.rms_norm(x + y, gain, 1e-6),
            lambda x, y, gain: theirs_norm(x + y, gain),
            [x, residual, gain],
        ),
        "rotation": (lambda q: ops.rotate(q.transpose(1, 2), table), theirs_rotary, [q]),
        "SwiGLU": (
            lambda gate, up: nn.functional.silu(gate) * up,
            theirs.LigerSiLUMulFunction.apply,
            [gate, up],
        ),
        "linear cross-entropy": (
            lambda x, weight: ops.linear_cross_entropy(x, weight, target),
            theirs_loss,
            [x, weight],
        ),
    }


def _drawn(*shape: int) -> Tensor:
    x = torch.randn(shape, device=best_device(), dtype=torch.bfloat16) / shape[-1] ** 0.25
    return x.requires_grad_()
