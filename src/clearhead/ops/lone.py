"""Attention of a lone query, a step of decoding, by two matrix products that read the cache as it
lies: the queries of a group are rows over its keys, and V1's maps share one reading of the value.

A CPU's flash kernel takes five times as long for it in bfloat16 (docs/performance.md).
"""

import torch
from torch import Tensor

from clearhead.ops import sinks, tiles
from clearhead.ops.precision import widened
from clearhead.ops.requests import HALF, Request
from clearhead.ops.rope import Rotation, cos_sin
from clearhead.ops.visibility import Visibility

backward = tiles.backward


def refuses(request: Request) -> str | None:
    """The reason why this does not compute the request, or more slowly than another."""
    if request.device == "cpu" and request.dtype not in HALF:
        return "flash is as fast in float32"
    return refuses_differential(request)


def refuses_differential(request: Request) -> str | None:
    """The reason why `difference` does not compute the request."""
    if not request.lone or request.segments or request.window:
        return "T = 1 without documents and windows only"
    return None


def refuses_unrotated(request: Request) -> str | None:
    """The reason why `forward` does not compute the request over unrotated keys, nor `prefixed`."""
    if request.learning:
        return "it has no gradient"
    return refuses_differential(request)


def forward(
    q_BH1D: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    rotation: Rotation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, 1, V] and its log-sum-exp, float32 [B, H, 1].

    rotation: keys are CoCA's t, [B, G, S, D/2], to be turned by it.
    """
    if rotation is None:
        score_BGRS = _scores(q_BH1D, k_BGSD, scale, visibility.key_mask)
    else:
        # (t cos) · q1 + (t sin) · q2: turned keys are never laid side by side.
        t = k_BGSD.to(torch.promote_types(k_BGSD.dtype, torch.float32)).relu()
        cos, sin = (part[..., -t.shape[2] :, :] for part in cos_sin(rotation.table()))
        first, second = q_BH1D.chunk(2, -1)
        score_BGRS = _scores(first, t * cos, scale, None)
        score_BGRS = score_BGRS + _scores(second, t.mul_(sin), scale, visibility.key_mask)
    lse_BGR = _log_sum_exp(score_BGRS)
    weight_BGRS = _weights(score_BGRS, lse_BGR, visibility.key_mask)
    o_BGRV = torch.matmul(weight_BGRS.to(v_BGSV.dtype), v_BGSV)
    return o_BGRV.flatten(1, 2).unsqueeze(2), lse_BGR.flatten(1, 2).unsqueeze(2)


def prefixed(
    q_BH1D: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    prefix: tuple[Tensor, Tensor],
    *,
    scale: float,
    visibility: Visibility,
) -> Tensor:
    """o [B, H, 1, V] over a prefix too, keys [B, G, N, D] and values [B, G, N, V]: more columns."""
    (batch, heads, _, _), (_, groups, number, _) = q_BH1D.shape, prefix[0].shape
    q = _rows(q_BH1D, groups, scale).flatten(0, 1)  # texts and groups are one dimension from here
    own_k, own_v, k, v = (x.flatten(0, 1) for x in (*prefix, k_BGSD, v_BGSV))
    score = torch.bmm(q, k.to(q.dtype).mT)
    if visibility.key_mask is not None:
        hidden = ~visibility.key_mask[:, None, None]
        score.view(batch, groups, -1, hidden.shape[-1]).masked_fill_(hidden, -torch.inf)
    weight = torch.cat([torch.bmm(q, own_k.to(q.dtype).mT), score], -1).softmax(-1).to(v.dtype)
    o = torch.baddbmm(torch.bmm(weight[..., :number], own_v), weight[..., number:], v)
    return o.view(batch, heads, 1, -1)


def difference(
    q_BH1D: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lam: Tensor,
    *,
    sink: float | Tensor | None,
    scale: float,
    visibility: Visibility,
) -> Tensor:
    """o1 − λ o2 before any norm, [B, H/2, 1, 2D] in the dtype of v: (P1 − λ P2) V by one product.

    Arguments as of `ops.differential`; PyTorch differentiates it.
    """
    heads, groups = q_BH1D.shape[1], k_BGSD.shape[1]
    shared = heads // groups
    # The first maps of the pairs that share keys are rows over the first key, the second over the
    # second: (pair of keys, pair of queries, map) → (pair of keys, map, pair of queries).
    by_map = (groups // 2, shared, 2)
    q = q_BH1D
    if shared > 1:
        q = q.unflatten(1, by_map).transpose(2, 3).flatten(1, 3)
    score_BGRS = _scores(q, k_BGSD, scale, visibility.key_mask)
    lse_BGR = _log_sum_exp(score_BGRS)
    if isinstance(sink, float | int):
        lse_BGR = torch.logaddexp(lse_BGR, torch.full_like(lse_BGR, float(sink)))
    elif sink is not None:
        by_row = sinks.by_row(sink, lse_BGR).expand(lse_BGR.shape[0], heads, 1)
        by_row = by_row.unflatten(1, by_map).transpose(2, 3)
        lse_BGR = torch.logaddexp(lse_BGR, by_row.reshape(lse_BGR.shape))
    weight_BGRS = _weights(score_BGRS, lse_BGR, visibility.key_mask)
    weight_BP2RS = weight_BGRS.unflatten(1, (groups // 2, 2))
    first, second = weight_BP2RS.unbind(2)
    difference_BP1RS = (first - lam.to(first.dtype) * second).to(v_BGSD.dtype)[:, :, None]
    o_BP2RD = torch.matmul(difference_BP1RS, v_BGSD.unflatten(1, (groups // 2, 2)))
    return o_BP2RD.transpose(2, 3).flatten(3).flatten(1, 2).unsqueeze(2)


def _scores(q_BH1D: Tensor, k_BGSD: Tensor, scale: float, key_mask: Tensor | None) -> Tensor:
    """[B, G, H/G, S], float32 whatever the inputs."""
    q_BGRD = _rows(q_BH1D, k_BGSD.shape[1], scale)
    score_BGRS = torch.matmul(q_BGRD, k_BGSD.to(q_BGRD.dtype).mT)
    if key_mask is None:
        return score_BGRS
    return torch.where(key_mask[:, None, None], score_BGRS, -torch.inf)


def _rows(q_BH1D: Tensor, groups: int, scale: float) -> Tensor:
    """The queries of a group as rows, times the scale: [B, G, H/G, D], float32 at least."""
    batch, _, _, width = q_BH1D.shape
    return (widened(q_BH1D) * scale).reshape(batch, groups, -1, width)


def _log_sum_exp(score_BGRS: Tensor) -> Tensor:
    """torch.logsumexp, by parts that a compiler traces over keys of unknown number too."""
    if not torch.compiler.is_compiling():
        return score_BGRS.logsumexp(-1)
    top = score_BGRS.amax(-1, keepdim=True).detach()
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = torch.exp(score_BGRS - shift).sum(-1, keepdim=True)
    log = torch.log(torch.where(total == 0, 1.0, total))
    return torch.where(total == 0, -torch.inf, shift + log).squeeze(-1)


def _weights(score_BGRS: Tensor, lse_BGR: Tensor, key_mask: Tensor | None) -> Tensor:
    """exp(score − lse); 0 where no key is seen."""
    if key_mask is None:
        return torch.exp(score_BGRS - lse_BGR[..., None])
    return torch.exp(score_BGRS - torch.where(lse_BGR == -torch.inf, torch.inf, lse_BGR)[..., None])
