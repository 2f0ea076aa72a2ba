"""Triton kernels of `clearhead.ops.differential_fused`, which alone imports this file.

Differential attention V1 in one pass over both maps' keys and the value of twice the width. A
program of the forward pass has M queries of one pair of heads, of the gradients of keys and values
N keys of one pair, of the queries' gradient M queries again. Scores and sums are float32; a map's
exponentials are to base 2.

Pairs of heads are numbered P, their keys' pairs P / R. q, k and v are read by their strides, with
rows of neighbouring numbers; a pair's value is two neighbouring heads of v. o, o2 and the gradients
lie as [B, T, P, 2, D], the rows' sums as [2, B, P, T].

SPLIT = 2 serves widths of which a program cannot hold all: each of two programs has one half of the
value's columns, and, for gradients, one map.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sees(
    own: tl.tensor,
    key: tl.tensor,
    id_q: tl.tensor,
    id_k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
    IDS: tl.constexpr,
) -> tl.tensor:
    """Where a query, by its place among the keys, sees a key; the two broadcast."""
    sees = (own < keys) & (key < keys)
    if CAUSAL:
        sees = sees & (key <= own) & (key > own - window)
    if IDS:
        sees = sees & (id_q == id_k)
    return sees


@triton.jit
def _ids(ptr, at, inside, MISSING: tl.constexpr, IDS: tl.constexpr):
    """Documents of a block's tokens, if there are any."""
    ids = tl.zeros(at.shape, tl.int32)
    if IDS:
        ids = tl.load(ptr + at, mask=inside, other=MISSING)
    return ids


@triton.jit
def _weights(a, b, lse, sees, scale):
    """A map's weights, of queries by keys or of keys by queries, from its log-sum-exps."""
    return tl.where(sees, tl.exp2(tl.dot(a, tl.trans(b)) * scale - lse), 0.0)


@triton.jit
def _accumulate(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, sees: tl.tensor, scale: tl.tensor,
    top: tl.tensor, total: tl.tensor, acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One map's share of a block of keys: k [D, N], v [N, E]."""
    score = tl.where(sees, tl.dot(q, k) * scale, -1e30)
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.where(sees, tl.exp2(score - higher[:, None]), 0.0)
    shrink = tl.exp2(top - higher)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return higher, total * shrink + tl.sum(weight, 1), acc


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, idq_ptr, idk_ptr, sink_ptr, lam_ptr, o_ptr, o2_ptr, lse_ptr,
    scale, pairs, shared, queries, keys, window,
    qb, qh, qt, kb, kh, ks, vb, vh, vs,
    D: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, IDS: tl.constexpr,
    SINK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """o = o1 − λ o2, o2, and both log-sum-exps to base 2, sinks included."""
    E: tl.constexpr = 2 * D // SPLIT
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    b, pair, part = tl.program_id(1) // pairs, tl.program_id(1) % pairs, tl.program_id(2)
    group = pair // shared
    b = b.to(tl.int64)
    before = keys - queries
    r, d, e = block * M + tl.arange(0, M), tl.arange(0, D), part * E + tl.arange(0, E)
    inside = r < queries
    at_q = q_ptr + b * qb + 2 * pair * qh + r[:, None] * qt + d[None, :]
    q1 = tl.load(at_q, mask=inside[:, None], other=0.0)
    q2 = tl.load(at_q + qh, mask=inside[:, None], other=0.0)
    id_q = _ids(idq_ptr, b * queries + r, inside, -1, IDS)
    top1 = tl.full([M], -1e30, tl.float32)
    top2 = tl.full([M], -1e30, tl.float32)
    total1 = tl.zeros([M], tl.float32)
    total2 = tl.zeros([M], tl.float32)
    acc1 = tl.zeros([M, E], tl.float32)
    acc2 = tl.zeros([M, E], tl.float32)
    start, end = 0, keys
    if CAUSAL:
        start = tl.maximum(block * M + before - window + 1, 0) // N * N
        end = tl.minimum(keys, (block + 1) * M + before)
    columns = v_ptr + b * vb + (2 * group + e // D) * vh + e % D
    for first in range(start, end, N):
        c = first + tl.arange(0, N)
        kept = c < keys
        id_k = _ids(idk_ptr, b * keys + c, kept, -2, IDS)
        sees = _sees(
            (r + before)[:, None], c[None, :], id_q[:, None], id_k[None, :],
            queries, keys, window, CAUSAL, IDS,
        )  # fmt: skip
        v = tl.load(columns[None, :] + c[:, None] * vs, mask=kept[:, None], other=0.0)
        at_k = k_ptr + b * kb + 2 * group * kh + c[None, :] * ks + d[:, None]
        k1 = tl.load(at_k, mask=kept[None, :], other=0.0)
        top1, total1, acc1 = _accumulate(q1, k1, v, sees, scale, top1, total1, acc1)
        k2 = tl.load(at_k + kh, mask=kept[None, :], other=0.0)
        top2, total2, acc2 = _accumulate(q2, k2, v, sees, scale, top2, total2, acc2)
    if SINK:
        sink1 = tl.load(sink_ptr + 2 * pair).to(tl.float32) * LOG2E
        sink2 = tl.load(sink_ptr + 2 * pair + 1).to(tl.float32) * LOG2E
        # The sink may lie far above every score.
        higher1, higher2 = tl.maximum(top1, sink1), tl.maximum(top2, sink2)
        shrink1, shrink2 = tl.exp2(top1 - higher1), tl.exp2(top2 - higher2)
        total1 = total1 * shrink1 + tl.exp2(sink1 - higher1)
        total2 = total2 * shrink2 + tl.exp2(sink2 - higher2)
        acc1, acc2 = acc1 * shrink1[:, None], acc2 * shrink2[:, None]
        top1, top2 = higher1, higher2
    # A query that sees no key has output 0, and no weight in a backward pass.
    top1, total1 = tl.where(total1 == 0, 1e30, top1), tl.where(total1 == 0, 1.0, total1)
    top2, total2 = tl.where(total2 == 0, 1e30, top2), tl.where(total2 == 0, 1.0, total2)
    acc1, acc2 = acc1 / total1[:, None], acc2 / total2[:, None]
    lam = tl.load(lam_ptr).to(tl.float32)
    base = (b * queries * pairs + pair) * (2 * D)
    at = (r * (pairs * 2 * D))[:, None] + e[None, :]
    tl.store(
        o_ptr + base + at, (acc1 - lam * acc2).to(o_ptr.dtype.element_ty), mask=inside[:, None]
    )
    tl.store(o2_ptr + base + at, acc2.to(o2_ptr.dtype.element_ty), mask=inside[:, None])
    if part == 0:
        lse = lse_ptr + (b * pairs + pair) * queries + r
        other = tl.num_programs(1).to(tl.int64) * queries
        tl.store(lse, top1 + tl.log2(total1), mask=inside)
        tl.store(lse + other, top2 + tl.log2(total2), mask=inside)


@triton.jit
def _add(at, share, inside):
    tl.atomic_add(at, share, mask=inside[:, None], sem="relaxed")


@triton.jit
def backward_rows(
    g_ptr, o_ptr, o2_ptr, lse_ptr, sink_ptr, lam_ptr, row_ptr, sum_ptr, dq_ptr,
    pairs, queries,
    D: tl.constexpr, SINK: tl.constexpr, ADDS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Σ g o1 and Σ g o2 of each row; a block's share of the gradients of λ and of both sinks.

    The last lie as [3, B, P, blocks]. With ADDS the queries' gradient is set to 0.
    """
    b, pair = (tl.program_id(1) // pairs).to(tl.int64), tl.program_id(1) % pairs
    r, e = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, 2 * D)
    inside = r < queries
    at = (b * queries * pairs + pair) * (2 * D) + (r * (pairs * 2 * D))[:, None] + e[None, :]
    g = tl.load(g_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    o2 = tl.load(o2_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if ADDS:
        tl.store(dq_ptr + at, tl.zeros([M, 2 * D], tl.float32), mask=inside[:, None])
    lam = tl.load(lam_ptr).to(tl.float32)
    row2 = tl.sum(g * o2, 1)
    row1 = tl.sum(g * o, 1) + lam * row2
    sums = (b * pairs + pair) * queries + r
    map2 = tl.num_programs(1).to(tl.int64) * queries
    tl.store(row_ptr + sums, row1, mask=inside)
    tl.store(row_ptr + map2 + sums, row2, mask=inside)
    out = sum_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    step = tl.num_programs(0) * tl.num_programs(1)
    tl.store(out, -tl.sum(row2, 0))
    if SINK:
        # A sink's weight in its row; the second map's output counts −λ times.
        sink = tl.load(sink_ptr + 2 * pair).to(tl.float32) * LOG2E
        lse = tl.load(lse_ptr + sums, mask=inside, other=float("inf"))
        tl.store(out + step, -tl.sum(tl.exp2(sink - lse) * row1, 0))
        sink = tl.load(sink_ptr + 2 * pair + 1).to(tl.float32) * LOG2E
        lse = tl.load(lse_ptr + map2 + sums, mask=inside, other=float("inf"))
        tl.store(out + 2 * step, lam * tl.sum(tl.exp2(sink - lse) * row2, 0))


@triton.jit
def backward_keys(
    q_ptr, k_ptr, v_ptr, idq_ptr, idk_ptr, lam_ptr, g_ptr, lse_ptr, row_ptr, dq_ptr, dk_ptr, dv_ptr,
    scale, pairs, shared, queries, keys, window,
    qb, qh, qt, kb, kh, ks, vb, vh, vs,
    D: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, IDS: tl.constexpr,
    ADDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dV = Σ (P1 − λ P2)ᵀ g and dK of each map; dP = g Vᵀ serves both. g: [B, T, P, 2, D].

    The pairs that share keys are walked in turn, so that nothing is added across programs, unless
    ADDS: then the queries' gradient too, float32 and zero before, by atomic additions.
    """
    E: tl.constexpr = 2 * D // SPLIT
    groups = pairs // shared
    b, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    block, part = tl.program_id(0), tl.program_id(2)
    before = keys - queries
    c, d, e = block * N + tl.arange(0, N), tl.arange(0, D), tl.arange(0, E)
    kept = c < keys
    at = k_ptr + b * kb + 2 * group * kh + c[:, None] * ks + d[None, :]
    k1 = tl.load(at, mask=kept[:, None], other=0.0)
    k2 = tl.load(at + kh, mask=kept[:, None], other=0.0)
    at = v_ptr + b * vb + (2 * group + e // D)[None, :] * vh + (e % D)[None, :] + c[:, None] * vs
    v = tl.load(at, mask=kept[:, None], other=0.0)
    id_k = _ids(idk_ptr, b * keys + c, kept, -2, IDS)
    dk1 = tl.zeros([N, D], tl.float32)
    dk2 = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, E], tl.float32)
    lam = tl.load(lam_ptr).to(tl.float32)
    start, end = 0, queries
    if CAUSAL:
        start = tl.maximum(block * N - before, 0) // M * M
        end = tl.minimum(queries, (block + 1) * N - 1 + window - before)
    map2 = tl.num_programs(1).to(tl.int64) * shared * queries
    for pair in range(group * shared, (group + 1) * shared):
        for first in range(start, end, M):
            r = first + tl.arange(0, M)
            inside = r < queries
            id_q = _ids(idq_ptr, b * queries + r, inside, -1, IDS)
            sees = _sees(
                (r + before)[None, :], c[:, None], id_q[None, :], id_k[:, None],
                queries, keys, window, CAUSAL, IDS,
            )  # fmt: skip
            at_g = g_ptr + (b * queries * pairs + pair) * (2 * D)
            at_g = at_g + (r * (pairs * 2 * D))[:, None] + e[None, :]
            g = tl.load(at_g, mask=inside[:, None], other=0.0)
            dp = tl.dot(v, tl.trans(g))
            if SPLIT == 2:
                v_other = tl.load(at + vh, mask=kept[:, None], other=0.0)
                g_other = tl.load(at_g + D, mask=inside[:, None], other=0.0)
                dp = tl.dot(v_other, tl.trans(g_other), dp)
                g = tl.where(part == 0, g, g_other)
            sums = (b * pairs + pair) * queries + r
            at_q = q_ptr + b * qb + 2 * pair * qh + r[:, None] * qt + d[None, :]
            at_dq = dq_ptr + (b * queries * pairs + pair) * (2 * D)
            at_dq = at_dq + (r * (pairs * 2 * D))[:, None] + d[None, :]
            q1 = tl.load(at_q, mask=inside[:, None], other=0.0)
            lse = tl.load(lse_ptr + sums, mask=inside, other=0.0)
            p1 = _weights(k1, q1, lse[None, :], sees, scale)
            if SPLIT == 1 or part == 0:
                row = tl.load(row_ptr + sums, mask=inside, other=0.0)
                share = (p1 * (dp - row[None, :])).to(q1.dtype)
                dk1 = tl.dot(share, q1, dk1)
                if ADDS:
                    _add(at_dq, tl.dot(tl.trans(share), k1) * (scale / LOG2E), inside)
            q2 = tl.load(at_q + qh, mask=inside[:, None], other=0.0)
            lse = tl.load(lse_ptr + map2 + sums, mask=inside, other=0.0)
            p2 = _weights(k2, q2, lse[None, :], sees, scale)
            if SPLIT == 1 or part == 1:
                row = tl.load(row_ptr + map2 + sums, mask=inside, other=0.0)
                share = (p2 * (dp - row[None, :])).to(q2.dtype)
                if SPLIT == 1:
                    dk2 = tl.dot(share, q2, dk2)
                else:
                    dk1 = tl.dot(share, q2, dk1)
                if ADDS:
                    dq = tl.dot(tl.trans(share), k2) * (-lam * scale / LOG2E)
                    _add(at_dq + D, dq, inside)
            dv = tl.dot((p1 - lam * p2).to(g.dtype), g, dv)
    # The scores' scale without the base: their derivative is to base e.
    scale = scale / LOG2E
    base = (b * keys * groups + group) * (2 * D)
    at = (c * (groups * 2 * D))[:, None]
    out = dk_ptr + base + at + d[None, :]
    if SPLIT == 1:
        tl.store(out, (dk1 * scale).to(dk_ptr.dtype.element_ty), mask=kept[:, None])
        dk2 = dk2 * (-lam * scale)
        tl.store(out + D, dk2.to(dk_ptr.dtype.element_ty), mask=kept[:, None])
    else:
        dk1 = dk1 * tl.where(part == 0, scale, -lam * scale)
        tl.store(out + part * D, dk1.to(dk_ptr.dtype.element_ty), mask=kept[:, None])
    out = dv_ptr + base + at + (part * E + e)[None, :]
    tl.store(out, dv.to(dv_ptr.dtype.element_ty), mask=kept[:, None])


@triton.jit
def backward_queries(
    q_ptr, k_ptr, v_ptr, idq_ptr, idk_ptr, lam_ptr, g_ptr, lse_ptr, row_ptr, dq_ptr,
    scale, pairs, shared, queries, keys, window,
    qb, qh, qt, kb, kh, ks, vb, vh, vs,
    D: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, IDS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of both maps, or, where SPLIT = 2, of the map that the program has."""
    E: tl.constexpr = 2 * D // SPLIT
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, pair, part = tl.program_id(1) // pairs, tl.program_id(1) % pairs, tl.program_id(2)
    group = pair // shared
    b = b.to(tl.int64)
    before = keys - queries
    r, d, e = block * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    inside = r < queries
    # With one map a program, `part` is that map; else map 1, and map 2 beside it.
    at_q = q_ptr + b * qb + (2 * pair + part) * qh + r[:, None] * qt + d[None, :]
    base = (b * queries * pairs + pair) * (2 * D)
    rows = (r * (pairs * 2 * D))[:, None]
    sums = (b * pairs + pair) * queries + r
    map2 = tl.num_programs(1).to(tl.int64) * queries
    q1 = tl.load(at_q, mask=inside[:, None], other=0.0)
    lse1 = tl.load(lse_ptr + part * map2 + sums, mask=inside, other=0.0)
    row1 = tl.load(row_ptr + part * map2 + sums, mask=inside, other=0.0)
    g = tl.load(g_ptr + base + rows + e[None, :], mask=inside[:, None], other=0.0)
    q2, lse2, row2, g_other = q1, lse1, row1, g
    if SPLIT == 1:
        q2 = tl.load(at_q + qh, mask=inside[:, None], other=0.0)
        lse2 = tl.load(lse_ptr + map2 + sums, mask=inside, other=0.0)
        row2 = tl.load(row_ptr + map2 + sums, mask=inside, other=0.0)
    else:
        g_other = tl.load(g_ptr + base + rows + D + e[None, :], mask=inside[:, None], other=0.0)
    id_q = _ids(idq_ptr, b * queries + r, inside, -1, IDS)
    dq1 = tl.zeros([M, D], tl.float32)
    dq2 = tl.zeros([M, D], tl.float32)
    start, end = 0, keys
    if CAUSAL:
        start = tl.maximum(block * M + before - window + 1, 0) // N * N
        end = tl.minimum(keys, (block + 1) * M + before)
    columns = v_ptr + b * vb + (2 * group + e // D) * vh + e % D
    for first in range(start, end, N):
        c = first + tl.arange(0, N)
        kept = c < keys
        id_k = _ids(idk_ptr, b * keys + c, kept, -2, IDS)
        sees = _sees(
            (r + before)[:, None], c[None, :], id_q[:, None], id_k[None, :],
            queries, keys, window, CAUSAL, IDS,
        )  # fmt: skip
        at = columns[:, None] + c[None, :] * vs
        dp = tl.dot(g, tl.load(at, mask=kept[None, :], other=0.0))
        if SPLIT == 2:
            dp = tl.dot(g_other, tl.load(at + vh, mask=kept[None, :], other=0.0), dp)
        at = k_ptr + b * kb + (2 * group + part) * kh + c[:, None] * ks + d[None, :]
        k1 = tl.load(at, mask=kept[:, None], other=0.0)
        p = _weights(q1, k1, lse1[:, None], sees, scale)
        dq1 = tl.dot((p * (dp - row1[:, None])).to(k1.dtype), k1, dq1)
        if SPLIT == 1:
            k2 = tl.load(at + kh, mask=kept[:, None], other=0.0)
            p = _weights(q2, k2, lse2[:, None], sees, scale)
            dq2 = tl.dot((p * (dp - row2[:, None])).to(k2.dtype), k2, dq2)
    lam = tl.load(lam_ptr).to(tl.float32)
    scale = scale / LOG2E
    at = dq_ptr + base + rows + part * D + d[None, :]
    dq1 = dq1 * tl.where(part == 0, scale, -lam * scale)
    tl.store(at, dq1.to(dq_ptr.dtype.element_ty), mask=inside[:, None])
    if SPLIT == 1:
        dq2 = dq2 * (-lam * scale)
        tl.store(at + D, dq2.to(dq_ptr.dtype.element_ty), mask=inside[:, None])
