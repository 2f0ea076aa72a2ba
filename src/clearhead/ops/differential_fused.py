"""Differential attention V1 by Triton kernels: one pass over both maps' keys and the wide value.

Forward 6 multiply-adds a score and channel where softmax attention of the same width has 4; the
gradients 14, in two deterministic kernels, or 10, in a single pass that adds the queries' gradient
in whatever order its programs come, where softmax attention has 10. The kernels lie in
`clearhead.ops.differential_kernels`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.ops.layouts import alike
from clearhead.ops.shaped_fused import STARTABLE
from clearhead.ops.visibility import Visibility

WIDTHS = (16, 32, 64, 128)
# Of a program that sums over a row's channels.
ROWS = 16


class Tiles(NamedTuple):
    """Queries and keys of a program's tile, its warps, and the stages of its pipeline.

    `split` is how many programs share the columns of a value.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    split: int = 1


class Launch(NamedTuple):
    """Tiles of the kernels; `single_pass` makes every gradient, the two before it one each."""

    forward: Tiles
    backward_keys: Tiles
    backward_queries: Tiles
    single_pass: Tiles


# By width, without a spill in registers (docs/performance.md). Hopper and Blackwell lend a program
# more than 200 KB of shared memory, other NVIDIA processors 99 KB or more, AMD's 64 KB.
HOPPER = {
    64: Launch(
        Tiles(128, 64, 8, 3), Tiles(32, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(16, 128, 8, 2)
    ),
    128: Launch(
        Tiles(128, 32, 8, 2, split=2),
        Tiles(16, 128, 8, 1, split=2),
        Tiles(64, 64, 8, 1, split=2),
        Tiles(32, 32, 8, 1),
    ),
}
BLACKWELL = {
    64: HOPPER[64]._replace(backward_keys=Tiles(16, 64, 8, 2)),
    128: HOPPER[128]._replace(single_pass=Tiles(16, 64, 8, 1, split=2)),
}
AMPERE = {
    64: Launch(Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
    128: Launch(
        Tiles(128, 32, 8, 2, split=2),
        Tiles(16, 64, 8, 1, split=2),
        Tiles(64, 64, 8, 1, split=2),
        Tiles(32, 32, 8, 1),
    ),
}
AMD = {
    64: Launch(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
    128: Launch(
        Tiles(64, 32, 4, 1, split=2),
        Tiles(16, 32, 4, 1, split=2),
        Tiles(32, 32, 4, 1, split=2),
        Tiles(16, 32, 4, 1, split=2),
    ),
}


def refuses(q_BHTD: Tensor, v_BGSD: Tensor, visibility: Visibility, sink: Any) -> str | None:
    """The reason why the kernels do not compute the request, if there is one."""
    if not STARTABLE or not q_BHTD.is_cuda:
        return "Triton on a GPU only"
    if q_BHTD.dtype not in (torch.bfloat16, torch.float16):
        return "bfloat16 and float16 only"
    if q_BHTD.shape[3] not in WIDTHS or v_BGSD.shape[3] != q_BHTD.shape[3]:
        return f"heads {', '.join(map(str, WIDTHS))} wide only"
    if visibility.window is not None and not visibility.causal:
        return "windows in causal attention only"
    if isinstance(sink, Tensor) and sink.ndim != 1:
        return "one sink logit a map"
    return None


def difference(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lam: Tensor,
    *,
    sink: float | Tensor | None = None,
    scale: float,
    visibility: Visibility,
    single_pass: bool = False,
) -> Tensor:
    """o1 − λ o2 before any norm, [B, H/2, T, 2D] in the dtype of q, rounded once from float32.

    Arguments as of `ops.differential`, with a gradient for every tensor of floats.

    Args:
        single_pass: make every gradient in one pass, whose last bits differ from run to run; not
            under torch.use_deterministic_algorithms.
    """
    single_pass = single_pass and not torch.are_deterministic_algorithms_enabled()
    heads, queries = q_BHTD.shape[1:3]
    visibility = visibility.settled(queries, k_BGSD.shape[2])
    if isinstance(sink, float | int):
        sink = torch.full((heads,), float(sink), device=q_BHTD.device)
    id_q = id_k = None
    if visibility.masked:
        id_q, id_k = _identities(visibility, queries)
    window = visibility.window if visibility.window is not None else k_BGSD.shape[2]
    o_BTPE, *_ = _forward(
        *(q_BHTD, k_BGSD, v_BGSD, lam, sink, id_q, id_k),
        *(visibility.causal, window, scale, single_pass),
    )
    return o_BTPE.transpose(1, 2)


def _identities(visibility: Visibility, queries: int) -> tuple[Tensor, Tensor]:
    """int32 [B, T] and [B, S], alike where a query's document is a key's and the key no padding."""
    mask = visibility.key_mask
    ids = visibility.segments
    if ids is None:
        assert mask is not None
        ids = torch.zeros_like(mask, dtype=torch.int32)
    # Documents from 0 on, so that no number given means padding.
    ids = (ids - ids.amin()).int()
    id_k = ids if mask is None else ids.masked_fill(~mask, -1)
    return ids[:, -queries:].contiguous(), id_k.contiguous()


@torch.library.custom_op("clearhead::differential", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    sink: Tensor | None,
    id_q: Tensor | None,
    id_k: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    single_pass: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o and o2 [B, T, H/2, 2D], and log-sum-exps to base 2 [2, B, H/2, T].

    `single_pass` is of the gradients alone.
    """
    from clearhead.ops import differential_kernels

    q, k, v = alike(q, k, v, multiple=8)
    batch, heads, queries, depth = q.shape
    o = q.new_empty(batch, queries, heads // 2, 2 * depth)
    o2 = torch.empty_like(o)
    lse = q.new_empty(2, batch, heads // 2, queries, dtype=torch.float32)
    tiles = _launch_of(q).forward
    grid = (-(-queries // tiles.rows), batch * heads // 2, tiles.split)
    with torch.cuda.device_of(q):
        differential_kernels.forward[grid](
            *(q, k, v, _given(id_q, lam), _given(id_k, lam), _given(sink, lam), lam, o, o2, lse),
            *_numbers(q, k, v, window, scale),
            **_constants(q, tiles, causal, id_q),
            SINK=sink is not None,
        )
    return o, o2, lse


@torch.library.custom_op("clearhead::differential_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    sink: Tensor | None,
    id_q: Tensor | None,
    id_k: Tensor | None,
    o: Tensor,
    o2: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
    scale: float,
    single_pass: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq [B, T, H, D], dk and dv [B, S, G, D], and by map dλ and dsink's sums, float32 [3, H/2].

    The first of the sums are λ's gradient by pair of heads, the others a map's sinks'.
    """
    from clearhead.ops import differential_kernels

    grad = grad.contiguous()
    q, k, v = alike(q, k, v, multiple=8)
    batch, heads, queries, depth = q.shape
    groups, keys = k.shape[1:3]
    pairs = heads // 2
    launch = _launch_of(q)
    exact = torch.float32
    dq = q.new_empty(batch, queries, heads, depth, dtype=exact if single_pass else q.dtype)
    dk = k.new_empty(batch, keys, groups, depth)
    dv = torch.empty_like(dk)
    rows = q.new_empty(2, batch, pairs, queries, dtype=exact)
    blocks = -(-queries // ROWS)
    sums = q.new_empty(3, batch, pairs, blocks, dtype=exact)
    inputs = (q, k, v, _given(id_q, lam), _given(id_k, lam), lam, grad, lse, rows)
    numbers = _numbers(q, k, v, window, scale)
    with torch.cuda.device_of(q):
        differential_kernels.backward_rows[blocks, batch * pairs](
            *(grad, o, o2, lse, _given(sink, lam), lam, rows, sums, dq, pairs, queries),
            **{"D": depth, "M": ROWS, "SINK": sink is not None, "ADDS": single_pass},
        )
        tiles = launch.single_pass if single_pass else launch.backward_keys
        grid = (-(-keys // tiles.keys), batch * groups // 2, tiles.split)
        differential_kernels.backward_keys[grid](
            *(*inputs, dq, dk, dv, *numbers), **_constants(q, tiles, causal, id_q), ADDS=single_pass
        )
        if not single_pass:
            tiles = launch.backward_queries
            grid = (-(-queries // tiles.rows), batch * pairs, tiles.split)
            differential_kernels.backward_queries[grid](
                *(*inputs, dq, *numbers), **_constants(q, tiles, causal, id_q)
            )
    return dq.to(q.dtype), dk, dv, sums.sum((1, 3))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, depth = q.shape
    o = q.new_empty(batch, queries, heads // 2, 2 * depth)
    lse = q.new_empty(2, batch, heads // 2, queries, dtype=torch.float32)
    return o, torch.empty_like(o), lse


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(len(x), x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(3, q.shape[1] // 2, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale, ctx.single_pass = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros in place of the others' gradients


def _gradients(ctx: Any, grad_BTPE: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    lam, sink = ctx.saved_tensors[3:5]
    dq, dk, dv, sums_3P = _backward(
        *(grad_BTPE, *ctx.saved_tensors, ctx.causal, ctx.window, ctx.scale, ctx.single_pass)
    )
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    dlam = sums_3P[0].sum().to(lam.dtype).reshape(lam.shape)
    dsink = None if sink is None else sums_3P[1:].T.flatten().to(sink.dtype)
    return dq, dk, dv, dlam, dsink, *[None] * 6


_forward.register_autograd(_gradients, setup_context=_remember)


def _given(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer that is not read takes the place of nothing."""
    return stand_in if x is None else x.contiguous()


def _numbers(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Any, ...]:
    queries, keys = q.shape[2], k.shape[2]
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    log2e = 1.4426950408889634
    pairs, shared = q.shape[1] // 2, q.shape[1] // k.shape[1]
    return (scale * log2e, pairs, shared, queries, keys, window, *strides)


def _constants(q: Tensor, tiles: Tiles, causal: bool, ids: Tensor | None) -> dict[str, Any]:
    names = {"D": q.shape[3], "SPLIT": tiles.split, "CAUSAL": causal, "IDS": ids is not None}
    names |= {"M": tiles.rows, "N": tiles.keys}
    return names | {"num_warps": tiles.warps, "num_stages": tiles.stages}


def _launch_of(q: Tensor) -> Launch:
    by_width = AMD
    if q.is_cuda and torch.version.hip is None:
        generation = torch.cuda.get_device_capability(q.device)[0]
        by_width = {9: HOPPER, 10: BLACKWELL}.get(generation, AMPERE)
    return by_width[128 if q.shape[3] > 64 else 64]
