"""Attention of a lone query on a GPU, by `split_decode_kernels`: keys split over the processors."""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops import tiles
from clearhead.ops.requests import HALF, PLAIN, Call, Request, alike
from clearhead.ops.rope import Rotation
from clearhead.ops.sinks import by_row, join

WIDTHS = (32, 64, 128)
# Parts of the keys: at most so many, for the second kernel holds all of them.
MOST_PARTS = 128
WARPS = 4
_LOG2E = 1.4426950408889634

backward = tiles.backward  # of the dot product alone; the others are refused where one is wanted


def block_of(row: int, rotated: bool) -> tuple[int, int]:
    """Keys per block, and blocks loaded ahead, by the bytes of a row: no register is spilled."""
    if rotated and row <= 128:
        return 64, 3
    return 32, 4 if row <= 128 else 3 if row == 256 else 2


def refuses(request: Request) -> str | None:
    if not request.lone or request.segments or request.window:
        return "T = 1 without documents and windows only"
    if request.dtype not in (*HALF, torch.float32):
        return "float32, bfloat16 and float16 only"
    if request.dtype == torch.bfloat16 and (request.capability or (8, 0)) < (8, 0):
        return "bfloat16 on Ampere or newer"
    if request.depth not in WIDTHS or request.width not in WIDTHS:
        return f"heads {', '.join(map(str, WIDTHS))} wide only"
    if request.learning and request.kind != PLAIN:
        return "it has no gradient"
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    return _decode(*call[:3], None, None, call.visibility.key_mask, None, None, call.scale)


def unrotated(call: Call, sink: float | Tensor | None, rotation: Rotation) -> Tensor:
    """o [B, H, 1, V] over CoCA's t, [B, G, S, D/2], rotated by `rotation`."""
    # A sliding cache has dropped early keys.
    turning = rotation.indices()[:, -call.k.shape[2] :], rotation.frequency
    scale, key_mask = call.scale * rotation.factor, call.visibility.key_mask
    o, lse = _decode(*call[:3], None, None, key_mask, *turning, scale)
    if isinstance(sink, float | int):
        sink = torch.full((call.q.shape[1],), float(sink), device=call.q.device)
    return o if sink is None else join(o, lse, sink)[0]


def difference(call: Call, lam: Tensor, sink: float | Tensor | None) -> Tensor:
    """o1 − λ o2 before any norm, [B, H/2, 1, 2D] in the dtype of q; the sink as in `lone`'s."""
    batch, heads = call.q.shape[:2]
    if isinstance(sink, float | int):
        sink = torch.full((batch, heads), float(sink), device=call.q.device)
    elif sink is not None:
        sink = by_row(sink.float(), lam).expand(batch, heads, 1)
    o, _ = _decode(*call[:3], lam, sink, call.visibility.key_mask, None, None, call.scale)
    return o


@torch.library.custom_op("clearhead::split_decode", mutates_args=())
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | None,
    sink: Tensor | None,
    key_mask: Tensor | None,
    positions: Tensor | None,
    frequency: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o and its log-sum-exp; with λ, the difference of two maps, and nothing."""
    from triton import next_power_of_2

    from clearhead.ops import split_decode_kernels

    q, k, v = (alike(x, multiple=8)[0] for x in (q, k, v))
    batch, heads, _, depth = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[3]
    maps = 1 if lam is None else 2
    units, shared = groups // maps, heads // groups
    block, stages = block_of(max(depth, width) * q.element_size(), positions is not None)
    part = part_of(batch * units, keys, block, _processors(q))
    parts = -(-keys // part)
    wide = maps * width
    o_parts = q.new_empty(parts, batch, heads, wide, dtype=torch.float32)
    lse_parts = q.new_empty(parts, batch, heads, dtype=torch.float32)
    o, lse = _outputs(q, v, maps)
    mask = q if key_mask is None else key_mask.contiguous().view(torch.uint8)
    turning, strides = (q, q), [0, 0]
    if positions is not None and frequency is not None:
        turning = positions, frequency
        # From text to text; 0 if all texts share it.
        strides = [x.stride(0) if x.ndim == 2 and len(x) > 1 else 0 for x in turning]
    with torch.cuda.device_of(q):
        split_decode_kernels.attend[(parts, batch * units)](
            *(q, k, v, mask, *turning, o_parts, lse_parts),
            *(scale * _LOG2E, units, shared, keys, part),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *strides),
            **{"D": depth, "V": width, "MAPS": maps, "ROTATED": positions is not None},
            **{"MASKED": key_mask is not None, "R": max(16, next_power_of_2(shared)), "N": block},
            num_warps=WARPS,
            num_stages=stages,
        )
        columns = min(64, wide)
        split_decode_kernels.combine[(batch * heads // maps, wide // columns)](
            *(o_parts, lse_parts, q if sink is None else sink.contiguous()),
            *(q if lam is None else lam, o, lse, batch * heads, parts),
            **{"W": wide, "MAPS": maps, "SINK": sink is not None, "PARTS": next_power_of_2(parts)},
            C=columns,
        )
    return o, lse


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, 1 if lam is None else 2)


def _outputs(q: Tensor, v: Tensor, maps: int) -> tuple[Tensor, Tensor]:
    batch, heads = q.shape[:2]
    o = q.new_empty(batch, heads // maps, 1, maps * v.shape[3])
    sums = (batch, heads, 1) if maps == 1 else (0,)
    return o, q.new_empty(sums, dtype=torch.float32)


def part_of(programs: int, keys: int, block: int, processors: int) -> int:
    """Keys per part, a multiple of `block`, for about four programs on each processor."""
    wanted = min(MOST_PARTS, max(1, 4 * processors // programs))
    return -(-keys // (wanted * block)) * block


def _processors(x: Tensor) -> int:
    if not x.is_cuda:
        return 1  # of Triton's interpreter
    return torch.cuda.get_device_properties(x.device).multi_processor_count
