"""Differential attention: V1, over one value of twice the width, and V2, with twice the queries."""

from typing import Any

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops.attention import attend as _attend
from clearhead.ops.attention import check, lone_kernel
from clearhead.ops.precision import rms_norm, widened, without_autocast
from clearhead.ops.requests import DIFFERENTIAL, Call
from clearhead.ops.visibility import Visibility


def differential(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lam: Tensor,
    *,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    gain: float | Tensor | None,
    sink: float | Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    attend: Any = _attend,
    **options: Any,
) -> Tensor:
    """gain · RMSNorm(softmax(q1 k1ᵀ) v − λ softmax(q2 k2ᵀ) v) (arXiv 2410.05258, eqs. 1 and 3).

    Neighbouring heads of the baseline form pairs: head i owns queries 2i and 2i+1; kv-pair g owns
    keys 2g and 2g+1 and, as the halves of one value of width 2D, values 2g and 2g+1. Head i reads
    kv-pair i // (H/G), as in the authors' flash files.

    Args:
        q_BHTD: queries, H even.
        k_BGSD: keys, G even.
        v_BGSD: values.
        lam: λ, a float32 scalar, shared by the layer's heads.
        norm_weight: [2D] or None (no gain); shared by the heads.
        norm_eps: added to the mean square; None leaves the norm out.
        gain: 1 − λ_init; None where `norm_weight` holds it.
        sink: as in `attend`; a tensor has logits for each of the H maps.
        prefix: as in `attend`, its keys and values paired as the others are.
        attend: attention function of the maps, with `ops.attend`'s signature.
        options: causal, window, key_mask, segments or visibility; scale, kernel; as in `attend`.

    Returns:
        [B, H/2, T, 2D] in the dtype of v.

    Raises:
        ClearheadError: an odd number of heads.
    """
    heads, groups = q_BHTD.shape[1], k_BGSD.shape[1]
    if heads % 2 or groups % 2:
        found = f"{heads} query and {groups} key heads"
        raise ClearheadError(
            f"differential attention pairs heads; found {found}: give even numbers"
        )
    difference = None
    if prefix is None and q_BHTD.shape[2] == 1 and attend is _attend:
        difference = _lone(q_BHTD, k_BGSD, v_BGSD, lam, sink, **options)
    if difference is None:
        q, k = _by_map(q_BHTD), _by_map(k_BGSD)
        v = _value_of_both(v_BGSD)
        if isinstance(sink, Tensor):
            sink = _by_map(sink, dim=0 if sink.ndim == 1 else 1)
        if prefix is not None:
            prefix = _by_map(prefix[0]), _value_of_both(prefix[1])
        o = attend(q, k, v, sink=sink, prefix=prefix, **options)
        first, second = widened(o).chunk(2, 1)
        difference = first - lam.to(first.dtype) * second
    difference = widened(difference)
    if norm_eps is not None:
        difference = rms_norm(difference, norm_weight, norm_eps)
    return (difference if gain is None else difference * gain).to(v_BGSD.dtype)


def _lone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    sink: float | Tensor | None,
    *,
    scale: float | None = None,
    kernel: str | None = None,
    visibility: Visibility | None = None,
    **masks: Any,
) -> Tensor | None:
    """o1 − λ o2 of a lone query, if there is a kernel for both maps."""
    visibility = Visibility(**masks) if visibility is None else visibility
    check(q, k, v, sink, visibility)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    run, call = lone_kernel(Call(q, k, v, scale, visibility), DIFFERENTIAL, kernel)
    if run is None:
        return None
    with without_autocast(q):
        o: Tensor = run.difference(call, lam, sink)
        return o


def _by_map(x: Tensor, dim: int = 1) -> Tensor:
    """The first map of every head, then the second: grouped queries keep to their pair."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _value_of_both(v_BGSD: Tensor) -> Tensor:
    """[B, G, S, 2D]: each pair's one value, for all first maps and then for all second; a copy."""
    v_B1PS2D = v_BGSD.unflatten(1, (-1, 2)).transpose(2, 3)[:, None]
    batch, groups, keys, width = v_BGSD.shape
    return v_B1PS2D.expand(-1, 2, -1, -1, -1, -1).reshape(batch, groups, keys, 2 * width)


def differential_v2(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lam: Tensor,
    *,
    attend: Any = _attend,
    **options: Any,
) -> Tensor:
    """softmax(q1 kᵀ) v − λ softmax(q2 kᵀ) v, λ for each token and head (Diff-Transformer-V2).

    Head i owns the neighbouring queries 2i and 2i+1, which read the same key and value. Pairs that
    straddle two groups make training unstable: an odd H / G is a ClearheadError.

    Args:
        q_BHTD: queries, twice as many as heads.
        lam: λ, float32 [B, H/2, T, 1].
        attend: attention function of the maps, with `ops.attend`'s signature.
        options: those of `attend`.

    Returns:
        [B, H/2, T, D] in the dtype of v.
    """
    heads, groups = q_BHTD.shape[1], k_BGSD.shape[1]
    if heads % (2 * groups):
        found = f"{heads} queries over {groups} key heads put a pair's maps on different keys"
        raise ClearheadError(f"{found}: give an even number of queries to each key head")
    o = widened(attend(q_BHTD, k_BGSD, v_BGSD, **options))
    return (o[:, 0::2] - lam.to(o.dtype) * o[:, 1::2]).to(v_BGSD.dtype)
