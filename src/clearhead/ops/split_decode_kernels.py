"""Triton kernels of `clearhead.ops.split_decode`, which alone imports this file.

`attend` has one program for each part of the keys, each key head (of V1: each pair of them) and
each text: the queries that share the head are the rows of its products, padded to R. `combine`
joins the parts, [parts, B, H, W] and [parts, B, H], by their log-sum-exps to base 2; a row that
sees no key of a part has −1e30 there, and output 0. Hidden slots of a cache are not read.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TURN = tl.constexpr(4294967296 / 6.283185307179586)  # of a circle's 2^32 parts, one radian
QUARTER = tl.constexpr(1.5707963267948966 / 1073741824)


@triton.jit
def _turned(phase: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """cos and sin of int32 parts of a circle: products of positions wrap around as angles do."""
    quarter = (phase + 536870912) >> 30
    x = (phase - (quarter << 30)).to(tl.float32) * QUARTER
    y = x * x
    cos = 1 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    sin = x * (1 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    odd = (quarter & 1) != 0
    first, second = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    return first, tl.where((quarter & 2) != 0, -second, second)


@triton.jit
def _accumulate(
    score: tl.tensor, v: tl.tensor, sees: tl.tensor,
    top: tl.tensor, total: tl.tensor, acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One map's share of a block of keys: score [R, N], v [N, W]."""
    score = tl.where(sees, score, -1e30)
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.where(sees, tl.exp2(score - higher[:, None]), 0.0)
    shrink = tl.exp2(top - higher)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weight, 1), acc


@triton.jit
def _store(
    o_ptr: tl.tensor, lse_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, e: tl.tensor,
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, W: tl.constexpr,
) -> None:  # fmt: skip
    """One map's part."""
    total = tl.where(total == 0, 1.0, total)
    tl.store(lse_ptr + at, top + tl.log2(total), mask=inside)
    out = o_ptr + at[:, None] * W + e[None, :]
    tl.store(out, acc / total[:, None], mask=inside[:, None])


@triton.jit
def _offsets(
    position_ptr: tl.tensor, mask_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The least and the greatest distance of visible keys' positions from their slots."""
    low, high = 1073741824, -1073741824
    for first in range(begin, end, 512):
        c = first + tl.arange(0, 512)
        sees = c < end
        if MASKED:
            sees = sees & (tl.load(mask_ptr + c, mask=sees, other=0) != 0)
        apart = tl.load(position_ptr + c, mask=sees, other=0) - c
        low = tl.minimum(low, tl.min(tl.where(sees, apart, 1073741824), 0))
        high = tl.maximum(high, tl.max(tl.where(sees, apart, -1073741824), 0))
    return low, high


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, mask_ptr, position_ptr, frequency_ptr, o_ptr, lse_ptr,
    scale, units, shared, keys, part,
    qb, qh, kb, kh, ks, vb, vh, vs, positionb, frequencyb,
    D: tl.constexpr, V: tl.constexpr, MAPS: tl.constexpr, ROTATED: tl.constexpr,
    MASKED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of each map over `part` keys.

    MAPS = 2 is differential attention V1: both maps' keys, and the value of both read once.
    ROTATED is CoCA: keys are t before the relu, D/2 wide, and rotated here, by their positions. A
    block's angles are the previous block's advanced by N positions; where padding lies between the
    keys of a part, they are computed for every block.
    """
    W: tl.constexpr = MAPS * V
    E: tl.constexpr = D // 2 if ROTATED else D
    b, unit = tl.program_id(1) // units, tl.program_id(1) % units
    b = b.to(tl.int64)
    begin = tl.program_id(0) * part
    end = tl.minimum(keys, begin + part)
    r, j, e, i = tl.arange(0, R), tl.arange(0, E), tl.arange(0, W), tl.arange(0, N)
    inside = r < shared
    head = (unit * shared + r) * MAPS
    at_q = q_ptr + b * qb + head[:, None] * qh + j[None, :]
    q1 = tl.load(at_q, mask=inside[:, None], other=0.0)
    q2 = q1
    if MAPS == 2:
        q2 = tl.load(at_q + qh, mask=inside[:, None], other=0.0)
    if ROTATED:
        q2 = tl.load(at_q + E, mask=inside[:, None], other=0.0)
        radian = tl.load(frequency_ptr + b * frequencyb + j).to(tl.float64)
        turn = (radian * TURN).to(tl.int64).to(tl.int32)
        low, high = _offsets(position_ptr + b * positionb, mask_ptr + b * keys, begin, end, MASKED)
        regular = low >= high
        cos, sin = _turned(turn[:, None] * (high + begin + i)[None, :])
        step_cos, step_sin = _turned(turn * N)
    top1 = tl.full([R], -1e30, tl.float32)
    top2 = tl.full([R], -1e30, tl.float32)
    total1 = tl.zeros([R], tl.float32)
    total2 = tl.zeros([R], tl.float32)
    acc1 = tl.zeros([R, W], tl.float32)
    acc2 = tl.zeros([R, W], tl.float32)
    at_k = k_ptr + b * kb + unit.to(tl.int64) * MAPS * kh + j[:, None]
    at_v = v_ptr + b * vb + unit.to(tl.int64) * MAPS * vh + (e // V * vh + e % V)[None, :]
    for first in range(begin, end, N):
        c = first + i
        sees = c < end
        if MASKED:
            sees = sees & (tl.load(mask_ptr + b * keys + c, mask=sees, other=0) != 0)
        slot = c.to(tl.int64)
        v = tl.load(at_v + slot[:, None] * vs, mask=sees[:, None], other=0.0)
        k1 = tl.load(at_k + slot[None, :] * ks, mask=sees[None, :], other=0.0)
        if ROTATED:
            if not regular:
                position = tl.load(position_ptr + b * positionb + c, mask=sees, other=0)
                cos, sin = _turned(turn[:, None] * position[None, :])
            t = tl.maximum(k1.to(tl.float32), 0.0)
            score = tl.dot(q1, (t * cos).to(k1.dtype), input_precision="ieee")
            score = tl.dot(q2, (t * sin).to(k1.dtype), score, input_precision="ieee")
            following = cos * step_cos[:, None] - sin * step_sin[:, None]
            sin = sin * step_cos[:, None] + cos * step_sin[:, None]
            cos = following
        else:
            score = tl.dot(q1, k1, input_precision="ieee")
        seen = sees[None, :]
        top1, total1, acc1 = _accumulate(score * scale, v, seen, top1, total1, acc1)
        if MAPS == 2:
            k2 = tl.load(at_k + kh + slot[None, :] * ks, mask=seen, other=0.0)
            score = tl.dot(q2, k2, input_precision="ieee") * scale
            top2, total2, acc2 = _accumulate(score, v, seen, top2, total2, acc2)
    heads = units * shared * MAPS
    at = (tl.program_id(0) * (tl.num_programs(1) // units) + b) * heads + head
    _store(o_ptr, lse_ptr, at, inside, e, top1, total1, acc1, W)
    if MAPS == 2:
        _store(o_ptr, lse_ptr, at + 1, inside, e, top2, total2, acc2, W)


@triton.jit
def _joined(
    o_ptr: tl.tensor, lse_ptr: tl.tensor, sink_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor,
    parts: tl.tensor, e: tl.tensor, W: tl.constexpr, SINK: tl.constexpr, PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """One map's output and its log-sum-exp to base 2."""
    s = tl.arange(0, PARTS)
    there = s < parts
    at = s.to(tl.int64) * rows + row
    lse = tl.load(lse_ptr + at, mask=there, other=-1e30)
    top = tl.max(lse, 0)
    total = 0.0
    if SINK:
        sink = tl.load(sink_ptr + row).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    weight = tl.exp2(lse - top)
    total += tl.sum(weight, 0)
    o = tl.load(o_ptr + at[:, None] * W + e[None, :], mask=there[:, None], other=0.0)
    return tl.sum(o * weight[:, None], 0) / total, tl.where(
        top <= -1e29, float("-inf"), top + tl.log2(total)
    )


@triton.jit
def combine(
    o_ptr, lse_ptr, sink_ptr, lam_ptr, out_ptr, out_lse_ptr, rows, parts,
    W: tl.constexpr, MAPS: tl.constexpr, SINK: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """o, or o1 − λ o2, rounded once, and the natural log-sum-exp of the first map."""
    row = tl.program_id(0)
    e = tl.program_id(1) * C + tl.arange(0, C)
    o, lse = _joined(o_ptr, lse_ptr, sink_ptr, row * MAPS, rows, parts, e, W, SINK, PARTS)
    if MAPS == 2:
        o2, _ = _joined(o_ptr, lse_ptr, sink_ptr, row * 2 + 1, rows, parts, e, W, SINK, PARTS)
        o -= tl.load(lam_ptr).to(tl.float32) * o2
    elif tl.program_id(1) == 0:
        tl.store(out_lse_ptr + row, lse / LOG2E)
    tl.store(out_ptr + row.to(tl.int64) * W + e, o.to(out_ptr.dtype.element_ty))
