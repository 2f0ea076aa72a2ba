"""Attention calls: their tensors and layouts, and the properties by which a kernel is chosen."""

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.visibility import Visibility

HALF = (torch.bfloat16, torch.float16)
# Kinds of request: the dot product; V1's two maps at once; CoCA's keys before their rotation; a
# prefix beside the keys.
KINDS = PLAIN, DIFFERENTIAL, UNROTATED, PREFIXED = "plain", "differential", "unrotated", "prefixed"
# Compiled tiles beat PyTorch's CPU flash kernel up to here (docs/log.md).
SHORT = 1024


class Call(NamedTuple):
    """Input of a kernel, which computes softmax(scale · q kᵀ) v over the keys that each query sees.

    `forward(call)` of a kernel returns the output o [B, H, T, V] and its log-sum-exp [B, H, T],
    float32 (float64 for float64). `backward(call, grad, o, lse)` returns the gradients of q, k and
    v: softmax-1's for the o and lse of softmax-1.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]; for UNROTATED CoCA's t, [B, G, S, D/2]
    v: Tensor  # [B, G, S, V]
    scale: float  # above 0
    visibility: Visibility


class Request(NamedTuple):
    """Properties of a call by which a kernel is chosen, all constants."""

    device: str
    ordinal: int | None
    capability: tuple[int, int] | None  # (9, 0) for Hopper; None off CUDA
    dtype: torch.dtype
    depth: int  # D
    width: int  # V
    shared: int  # H / G
    lone: bool  # T = 1
    square: bool  # T = S > 1
    short: bool  # compiled, and S ≤ SHORT
    causal: bool
    window: bool
    key_mask: bool
    segments: bool
    learning: bool  # gradients are wanted
    sink: bool = False  # a sink or a prefix joins the log-sum-exp
    kind: str = PLAIN

    def __str__(self) -> str:
        """The properties that hold, such as "device cuda, depth 64, causal"."""
        held = [(name, value) for name, value in self._asdict().items() if value]
        return ", ".join(name if value is True else f"{name} {value}" for name, value in held)


def repeat(x_BGSN: Tensor, heads: int, together: int = 1) -> Tensor:
    """[B, G, S, N] → [B, H, S, N]: head h, or with `together` = 2 pair h, gets h // (H / G)."""
    groups = x_BGSN.shape[1]
    if groups == heads:
        return x_BGSN
    return x_BGSN.unflatten(1, (-1, together)).repeat_interleave(heads // groups, 1).flatten(1, 2)


def add(x_BHSN: Tensor, groups: int) -> Tensor:
    """[B, H, S, N] → [B, G, S, N]: sums over repeated heads, the gradient of `repeat`."""
    return x_BHSN if x_BHSN.shape[1] == groups else x_BHSN.unflatten(1, (groups, -1)).sum(2)


def alike(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """The tensors with last dimensions made contiguous and zero-padded to the widest one's.

    Kernels check nothing. Vectorised loads need widths and row starts that are whole `multiple`s.
    """
    width = max(x.shape[-1] for x in tensors)
    if multiple == 1 and all(x.shape[-1] == width and x.stride(-1) == 1 for x in tensors):
        return list(tensors)
    width += -width % multiple
    return [_ready(x, width, multiple) for x in tensors]


def _ready(x: Tensor, width: int, multiple: int) -> Tensor:
    if x.shape[-1] != width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    # torch.compile aligns its inputs, and cannot trace storage_offset.
    first = 0 if torch.compiler.is_compiling() else x.storage_offset()
    starts = (first, *x.stride()[:-1])
    if x.stride(-1) == 1 and all(start % multiple == 0 for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)
