"""Repeated key/value heads, and the widths and memory layouts that kernels require."""

import torch
from torch import Tensor


def repeat(x_BGSN: Tensor, heads: int, together: int = 1) -> Tensor:
    """[B, G, S, N] → [B, H, S, N]: head h gets group h // (H / G).

    With `together` = 2 the heads are repeated in pairs: pair h gets pair h // (H / G).
    """
    groups = x_BGSN.shape[1]
    if groups == heads:
        return x_BGSN
    return x_BGSN.unflatten(1, (-1, together)).repeat_interleave(heads // groups, 1).flatten(1, 2)


def add(x_BHSN: Tensor, groups: int) -> Tensor:
    """[B, H, S, N] → [B, G, S, N]: sums over repeated heads, the gradient of `repeat`."""
    return x_BHSN if x_BHSN.shape[1] == groups else x_BHSN.unflatten(1, (groups, -1)).sum(2)


def alike(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """The tensors with last dimensions made contiguous and zero-padded to the widest one's.

    Called below `scaled_dot_product_attention`, kernels assume contiguous rows and check nothing.

    Args:
        multiple: width and row starts are rounded up to multiples of it, for vectorised loads.
    """
    ready = multiple == 1
    for x in tensors:
        ready = ready and x.shape[-1] == tensors[0].shape[-1] and x.stride(-1) == 1
    if ready:
        return list(tensors)
    width = max(x.shape[-1] for x in tensors)
    width += -width % multiple
    return [_ready(x, width, multiple) for x in tensors]


def _ready(x: Tensor, width: int, multiple: int) -> Tensor:
    if x.shape[-1] != width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    # A compiler aligns what it is given, and cannot trace the question.
    first = 0 if torch.compiler.is_compiling() else x.storage_offset()
    starts = (first, *x.stride()[:-1])
    if x.stride(-1) == 1 and all(start % multiple == 0 for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)
