"""Shaped attention with its running mean in one pass over memory each way, on a GPU.

The mean is a scan, and the gains' gradients are sums over all tokens; PyTorch's compiler would read
the inputs several times.
"""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tokens and channels of a program's tile, and its warps (others: docs/log.md). 32 numbers
# of float32 are a line of the cache; four numbers a thread keep the registers few, 64 and 80 on
# sm_90, so that several programs share a processor and hide each other's waiting.
BLOCK_T, BLOCK_C, WARPS = 32, 32, 8


def _startable() -> bool:
    """True if Triton is installed (CPU builds of PyTorch lack it) and can start a kernel.

    That takes a C compiler, which slim images lack.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_config_var("INCLUDEPY") or "", "Python.h")
    triton = importlib.util.find_spec("triton")
    return triton is not None and compiler is not None and headers.exists()


# Evaluated at import: torch.compile cannot trace this check.
STARTABLE = _startable()


def supports(x_BTHD: Tensor, o_BTHD: Tensor) -> bool:
    """True if the kernels can run on these."""
    return STARTABLE and x_BTHD.is_cuda and x_BTHD.dtype in DTYPES and o_BTHD.dtype in DTYPES


@torch.library.custom_op("clearhead::shaped_causal", mutates_args=())
def forward(
    x_BTC: Tensor, o_BTC: Tensor, alpha_H: Tensor, beta_H: Tensor, gamma_H: Tensor
) -> Tensor:
    """`ops.shaped_causal` with the heads side by side; x, o of DTYPES, gains of any float dtype.

    Sums run in float32, in an order that shape, dtypes and device fix. No second derivative:
    asking for it is a RuntimeError.
    """
    # Lazy import: Triton may be missing, and Dynamo must not trace it.
    from clearhead.ops import shaped_kernels

    x, o = x_BTC.contiguous(), o_BTC.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        shaped_kernels.forward[_programs(x)](
            *(x, o, *_plain(alpha_H, beta_H, gamma_H), out),
            *(*x.shape[1:], x.shape[2] // len(alpha_H)),
            BLOCK_T=BLOCK_T,
            BLOCK_C=BLOCK_C,
            num_warps=WARPS,
        )
    return out


@torch.library.custom_op("clearhead::shaped_causal_backward", mutates_args=())
def backward(
    grad_BTC: Tensor, x_BTC: Tensor, o_BTC: Tensor, alpha_H: Tensor, beta_H: Tensor, gamma_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, do, and float32 [3, B, C]: the gains' gradients before they are summed by head."""
    from clearhead.ops import shaped_kernels

    grad, x, o = grad_BTC.contiguous(), x_BTC.contiguous(), o_BTC.contiguous()
    dx, do = torch.empty_like(x), torch.empty_like(o)
    gains = torch.empty(3, len(x), x.shape[2], dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        shaped_kernels.backward[_programs(x)](
            *(grad, x, o, *_plain(alpha_H, beta_H, gamma_H), dx, do, gains),
            *(*x.shape, x.shape[2] // len(alpha_H)),
            BLOCK_T=BLOCK_T,
            BLOCK_C=BLOCK_C,
            num_warps=WARPS,
        )
    return dx, do, gains


@forward.register_fake
def _(x: Tensor, o: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@backward.register_fake
def _(
    grad: Tensor, x: Tensor, o: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gains = x.new_empty(3, x.shape[0], x.shape[2], dtype=torch.float32)
    return x.new_empty(x.shape), o.new_empty(o.shape), gains


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    x, o, *gains = ctx.saved_tensors
    dx, do, sums_3BC = backward(grad, x, o, *gains)
    sums_3H = sums_3BC.unflatten(-1, (len(gains[0]), -1)).sum((1, 3))
    dgains = (found.to(gain.dtype) for found, gain in zip(sums_3H, gains, strict=True))
    return dx, do, *dgains


forward.register_autograd(_gradients, setup_context=_remember)


def _programs(x_BTC: Tensor) -> tuple[int]:
    return (len(x_BTC) * -(-x_BTC.shape[2] // BLOCK_C),)


def _plain(*gains_H: Tensor) -> tuple[Tensor, ...]:
    return tuple(gain.contiguous() for gain in gains_H)
