"""Quantise and dequantise tensors.

Both round half to even, compute in float32 at least, and return the dtype that they were given.
Numbers are divided by their group's range before they are multiplied by the number of levels, so
that no scale can underflow, whatever the size of the numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError

FEWEST, MOST = 2, 16  # bits
GROUP = 128  # inputs of a channel that share a scale
MX_BLOCK = 32  # the same in MXFP4
MX_TOP = 6.0  # the largest four-bit float
FP8_TOP = 448.0  # the largest float8_e4m3fn


def absmax(x: Tensor, bits: int, dims: tuple[int, ...], *, top: Tensor | None = None) -> Tensor:
    """Symmetric: x̂ = round(L·x/a) · a/L with a = max|x| and L = 2^(bits−1) − 1.

    LLM.int8 (arXiv 2208.07339, section 2.1) and arXiv 2410.17174, section 5.2.

    Args:
        x: of any shape and floating dtype.
        bits: 2 to 16; the most negative code is left unused.
        dims: the dimensions over which numbers share a scale.
        top: a, where it is not that of x itself (a static scale), of any shape that broadcasts to
            x; numbers beyond it become ±a.

    Returns:
        As x. Groups of zeros stay zero; a number of size a is kept exactly in x's own dtype.

    Raises:
        ClearheadError: bits outside 2 to 16; NaN or infinity in x, with their number.
    """
    levels = 2 ** (checked(bits) - 1) - 1
    wide, a = largest_of(x, dims, top)
    steps = (wide / torch.where(a == 0, 1.0, a)).clamp_(-1, 1).mul_(levels).round_()
    return steps.div_(levels).mul_(a).to(x.dtype)


def zeropoint(x: Tensor, bits: int, dims: tuple[int, ...], *, kept: float = 1.0) -> Tensor:
    """Asymmetric: x̂ = (clamp(round(L·x/r) + z, 0, L) − z) · r/L, z = round(−L·min/r).

    L = 2^bits − 1 and r = max − min, with min ≤ 0 ≤ max: a range that lies on one side of zero is
    stretched to it, so that zero is always exact (as in Jacob et al., arXiv 1712.05877, section 2).

    Args:
        kept: min and max are multiplied by it beforehand; numbers outside are clipped.

    Other arguments, result and errors as in `absmax`. Constant groups are exact up to rounding.
    """
    levels = 2 ** checked(bits) - 1
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low = wide.amin(dims, keepdim=True).clamp_max(0) * kept
    spread = wide.amax(dims, keepdim=True).clamp_min(0) * kept - low
    _check_finite(spread, x)
    safe = torch.where(spread == 0, 1.0, spread)
    zero = (low / safe).mul_(-levels).round_()
    codes = (wide / safe).mul_(levels).round_().add_(zero).clamp_(0, levels)
    return codes.sub_(zero).div_(levels).mul_(spread).to(x.dtype)


def integers(
    x: Tensor,
    bits: int,
    dims: tuple[int, ...],
    *,
    top: Tensor | None = None,
    levels: float | None = None,
) -> Tensor:
    """As kernels compute: x̂ = s · clamp(round(x/s), −L − 1, L) with s = a/L and L = 2^(bits−1) − 1.

    Differs from `absmax` in rounding, and in using the most negative code for numbers below −`top`.

    Args:
        levels: divisor of a in place of L.

    Other arguments, result and errors as of `absmax`.
    """
    largest = 2 ** (checked(bits) - 1) - 1
    wide, a = largest_of(x, dims, top)
    scale = torch.where(a == 0, 1.0, a / (levels or largest))
    codes = (wide / scale).round_().clamp_(-largest - 1, largest)
    return codes.mul_(scale).to(x.dtype)


def fp8(x: Tensor, dims: tuple[int, ...], *, top: Tensor | None = None) -> Tensor:
    """Eight-bit floats: x̂ = s · e4m3(x/s) with s = a/448, a = max|x|; halves to the even mantissa.

    float8_e4m3fn (arXiv 2209.05433) has 3 bits of mantissa and exponents from −6 to 8.

    Arguments, result and errors as of `absmax`.
    """
    wide, a = largest_of(x, dims, top)
    scale = torch.where(a == 0, 1.0, a / FP8_TOP)
    codes = (wide / scale).clamp_(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn)
    return codes.to(wide.dtype).mul_(scale).to(x.dtype)


def largest_of(
    x: Tensor, dims: tuple[int, ...], top: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x in float32 at least, and the largest |x| over `dims`, or `top` in its place."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    found = wide.abs().amax(dims, keepdim=True)
    _check_finite(found, x)
    return wide, found if top is None else top.to(wide.dtype)


def mxfp4(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """MXFP4 (Open Compute Project, Microscaling Formats 1.0): ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^e.

    e = floor(log2 max|x|) − 2 is shared over `dims`, so that the largest falls between 4 and 8 and
    what is above 6 becomes 6. Halves round to the even mantissa. e is not bounded here (the format
    has 8 bits for it).

    Arguments, result and errors as of `absmax`.
    """
    wide, top = largest_of(x, dims)
    exponent = torch.frexp(top).exponent - 3  # frexp's mantissa is below 1: floor(log2) + 1
    scaled = torch.ldexp(wide, -exponent)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    floats = (scaled / step).round_().mul_(step).clamp_(-MX_TOP, MX_TOP)
    return torch.ldexp(floats, exponent).to(x.dtype)


def grouped(x_OI: Tensor, group: int) -> Tensor:
    """[O, I] → [O, groups, group], for one scale per group; the last group is padded with zeros,
    which change neither quantiser's range."""
    return F.pad(x_OI, (0, -x_OI.shape[1] % group)).unflatten(1, (-1, group))


def ungrouped(x_OGI: Tensor, width: int) -> Tensor:
    """Undo `grouped`: [O, groups, group] → [O, width]."""
    return x_OGI.flatten(1)[:, :width]


def checked(bits: int) -> int:
    """Return `bits` if it is a supported number; else raise a ClearheadError."""
    if not FEWEST <= bits <= MOST:
        raise ClearheadError(f"{bits} bits: choose {FEWEST} to {MOST}")
    return bits


def _check_finite(ranges: Tensor, x: Tensor) -> None:
    # A NaN or an infinity anywhere shows in its group's range, which is far smaller than x.
    if bool(ranges.isfinite().all()):
        return
    nan, infinite = int(x.isnan().sum()), int(x.isinf().sum())
    if nan or infinite:
        found = f"{nan:,} NaN and {infinite:,} infinite of {x.numel():,} numbers"
    else:
        found = f"a range beyond {torch.finfo(ranges.dtype).max:.1e}"
    raise ClearheadError(f"nothing to quantise: {found} in a tensor of {list(x.shape)}")
