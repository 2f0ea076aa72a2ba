"""Quantise and dequantise: x̂ in the dtype of x, of any shape, computed in float32 at least.

Numbers along `dims` share a scale, taken from their largest |x|, a; `top` replaces a (a static
scale: numbers beyond it become ±a). Halves round to even, and groups of zeros stay zero. Numbers
are divided by their group's range before they are multiplied by the number of levels, so that no
scale underflows. NaN or infinity in x raises a ClearheadError with their number.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError

MX_TOP = 6.0  # the largest four-bit float
FP8_TOP = 448.0  # the largest float8_e4m3fn


def absmax(x: Tensor, bits: int, dims: tuple[int, ...], *, top: Tensor | None = None) -> Tensor:
    """Symmetric: x̂ = round(L·x/a) · a/L with L = 2^(bits−1) − 1 (arXiv 2208.07339, section 2.1)."""
    levels = 2 ** (bits - 1) - 1
    wide, a = largest_of(x, dims, top)
    steps = (wide / torch.where(a == 0, 1.0, a)).clamp_(-1, 1).mul_(levels).round_()
    return steps.div_(levels).mul_(a).to(x.dtype)


def zeropoint(x: Tensor, bits: int, dims: tuple[int, ...], *, kept: float = 1.0) -> Tensor:
    """Asymmetric: x̂ = (clamp(round(L·x/r) + z, 0, L) − z) · r/L, z = round(−L·min/r).

    L = 2^bits − 1 and r = max − min, with min ≤ 0 ≤ max so that zero is exact (arXiv 1712.05877,
    section 2), both multiplied by `kept` first: numbers outside are clipped.
    """
    levels = 2**bits - 1
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

    Rounds otherwise than `absmax`, and numbers below −`top` get the most negative code. `levels`
    divides a in place of L.
    """
    largest = 2 ** (bits - 1) - 1
    wide, a = largest_of(x, dims, top)
    scale = torch.where(a == 0, 1.0, a / (levels or largest))
    codes = (wide / scale).round_().clamp_(-largest - 1, largest)
    return codes.mul_(scale).to(x.dtype)


def fp8(x: Tensor, dims: tuple[int, ...], *, top: Tensor | None = None) -> Tensor:
    """Eight-bit floats, x̂ = s · e4m3(x/s) with s = a/448: float8_e4m3fn (arXiv 2209.05433), 3 bits
    of mantissa and exponents from −6 to 8."""
    wide, a = largest_of(x, dims, top)
    scale = torch.where(a == 0, 1.0, a / FP8_TOP)
    codes = (wide / scale).clamp_(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn)
    return codes.to(wide.dtype).mul_(scale).to(x.dtype)


def mxfp4(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """MXFP4 (Open Compute Project, Microscaling Formats 1.0): ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^e.

    e = floor(log2 a) − 2, so that a falls between 4 and 8, and what is above 6 becomes 6. It is not
    bounded here; the format has 8 bits for it.
    """
    wide, top = largest_of(x, dims)
    exponent = torch.frexp(top).exponent - 3  # frexp's mantissa is below 1: floor(log2) + 1
    scaled = torch.ldexp(wide, -exponent)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    floats = (scaled / step).round_().mul_(step).clamp_(-MX_TOP, MX_TOP)
    return torch.ldexp(floats, exponent).to(x.dtype)


def largest_of(
    x: Tensor, dims: tuple[int, ...], top: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x in float32 at least, and the largest |x| over `dims`, or `top` in its place."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(dims, keepdim=True)
    _check_finite(largest, x)
    return wide, largest if top is None else top.to(wide.dtype)


def grouped(x_OI: Tensor, group: int) -> Tensor:
    """[O, I] → [O, groups, group]; zeros that pad the last group change no quantiser's range."""
    return F.pad(x_OI, (0, -x_OI.shape[1] % group)).unflatten(1, (-1, group))


def _check_finite(ranges: Tensor, x: Tensor) -> None:
    # A NaN or an infinity anywhere shows in its group's range, which is far smaller than x.
    if bool(ranges.isfinite().all()):
        return
    count = f"{x.isnan().sum()} NaN and {x.isinf().sum()} infinite of {x.numel():,} numbers"
    shape = f"in a tensor of {list(x.shape)}, or too large a range"
    raise ClearheadError(f"nothing to quantise: {count} {shape}")
