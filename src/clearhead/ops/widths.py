"""Widths and layouts that kernels below `scaled_dot_product_attention` read as they are."""

import torch
from torch import Tensor


def alike(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """The same tensors, their last dimensions contiguous and as wide as the widest, by zeros.

    The kernels read rows as if a row's numbers were neighbours, and check nothing when they are
    called below `scaled_dot_product_attention`. Padding may keep a layout whose rows are not.

    Args:
        multiple: the width is rounded up to a multiple of it, and rows begin at one: kernels that
            ask for it load so many numbers at once.
    """
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
