"""Attention of a lone query (a decoding step) by two matrix products over the cache as stored."""

import torch
from torch import Tensor

from clearhead.ops import sinks, tiles
from clearhead.ops.precision import widened
from clearhead.ops.requests import HALF, PLAIN, PREFIXED, UNROTATED, Call, Request
from clearhead.ops.rope import Rotation, cos_sin

backward = tiles.backward


def refuses(request: Request) -> str | None:
    if request.kind in (UNROTATED, PREFIXED):
        if request.device != "cpu":
            return "for CoCA and a prefix on a CPU only"
        if request.learning:
            return "it has no gradient"
    if request.kind == PLAIN and request.device == "cpu" and request.dtype not in HALF:
        return "flash is as fast in float32"
    if not request.lone or request.segments or request.window:
        return "T = 1 without documents and windows only"
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    key_mask = call.visibility.key_mask
    score_BGRS = _scores(call.q, call.k, call.scale)
    if key_mask is not None:
        score_BGRS = torch.where(key_mask[:, None, None], score_BGRS, -torch.inf)
    lse_BGR = finite_BGR = _log_sum_exp(score_BGRS)
    if key_mask is not None:  # a weight of 0 where no key is seen
        finite_BGR = torch.where(lse_BGR == -torch.inf, torch.inf, lse_BGR)
    weight_BGRS = torch.exp(score_BGRS - finite_BGR[..., None])
    return _by_head(torch.matmul(weight_BGRS.to(call.v.dtype), call.v)), _by_head(lse_BGR)


def unrotated(call: Call, sink: float | Tensor | None, rotation: Rotation) -> Tensor:
    """o [B, H, 1, V] over CoCA's t, [B, G, S, D/2], rotated by `rotation`."""
    # (t cos) · q1 + (t sin) · q2: turned keys are never laid side by side.
    t = widened(call.k).relu()
    cos, sin = (part[..., -t.shape[2] :, :] for part in cos_sin(rotation.table()))
    first, second = widened(call.q).chunk(2, -1)
    score_BGRS = _scores(first, t * cos, call.scale)
    score_BGRS = _scores(second, t.mul_(sin), call.scale, score_BGRS)
    if isinstance(sink, Tensor):
        by_row = sinks.by_row(sink, score_BGRS).expand(len(score_BGRS), call.q.shape[1], 1)
        sink = by_row.reshape(score_BGRS.shape[:3])
    weight_BGRS = _weights(score_BGRS, sink, call.visibility.key_mask)
    return _by_head(torch.matmul(weight_BGRS.to(call.v.dtype), call.v))


def prefixed(call: Call, prefix: tuple[Tensor, Tensor]) -> Tensor:
    """o [B, H, 1, V] with a prefix, keys [B, G, N, D] and values [B, G, N, V], as extra columns."""
    (batch, heads, _, width), (_, groups, number, _) = call.q.shape, prefix[0].shape
    q = (widened(call.q) * call.scale).reshape(batch * groups, -1, width)
    own_k, own_v, k, v = (x.flatten(0, 1) for x in (*prefix, call.k, call.v))
    score = torch.bmm(q, k.to(q.dtype).mT)
    if call.visibility.key_mask is not None:
        hidden = ~call.visibility.key_mask[:, None, None]
        score.view(batch, groups, -1, hidden.shape[-1]).masked_fill_(hidden, -torch.inf)
    weight = torch.cat([torch.bmm(q, own_k.to(q.dtype).mT), score], -1).softmax(-1).to(v.dtype)
    o = torch.baddbmm(torch.bmm(weight[..., :number], own_v), weight[..., number:], v)
    return o.view(batch, heads, 1, -1)


def difference(call: Call, lam: Tensor, sink: float | Tensor | None) -> Tensor:
    """o1 − λ o2 before any norm, [B, H/2, 1, 2D] in the dtype of v: (P1 − λ P2) V by one product.

    Arguments as in `ops.differential`.
    """
    heads, groups = call.q.shape[1], call.k.shape[1]
    shared = heads // groups
    # (pair of keys, pair of queries, map) → (pair of keys, map, pair of queries).
    by_map = (groups // 2, shared, 2)
    q = call.q
    if shared > 1:
        q = q.unflatten(1, by_map).transpose(2, 3).flatten(1, 3)
    score_BGRS = _scores(q, call.k, call.scale)
    if isinstance(sink, Tensor):
        by_row = sinks.by_row(sink, score_BGRS).expand(len(score_BGRS), heads, 1)
        sink = by_row.unflatten(1, by_map).transpose(2, 3).reshape(score_BGRS.shape[:3])
    weight_BGRS = _weights(score_BGRS, sink, call.visibility.key_mask)
    first, second = weight_BGRS.unflatten(1, (groups // 2, 1, 2)).unbind(3)
    # The weights of both of the value's halves, written in one pass.
    second = second.expand(-1, -1, 2, -1, -1)
    difference_BP2RS = torch.addcmul(first, lam.to(first.dtype), second, value=-1)
    v_BP2SD = call.v.unflatten(1, (groups // 2, 2))
    o_BP2RD = torch.matmul(difference_BP2RS.to(call.v.dtype), v_BP2SD)
    return o_BP2RD.transpose(2, 3).flatten(3).flatten(1, 2).unsqueeze(2)


def _by_head(x_BGRN: Tensor) -> Tensor:
    """[B, G, H/G, …] → [B, H, 1, …]."""
    return x_BGRN.flatten(1, 2).unsqueeze(2)


def _scores(
    q_BH1D: Tensor, k_BGSD: Tensor, scale: float, rest_BGRS: Tensor | None = None
) -> Tensor:
    """scale · q kᵀ + rest, [B, G, H/G, S], float32 whatever the inputs."""
    (batch, groups, _, width), q = k_BGSD.shape, widened(q_BH1D)
    q = q.reshape(batch * groups, -1, width)  # the queries of a group are rows over its keys
    k = k_BGSD.to(q.dtype).flatten(0, 1)
    rest = q.detach()[..., :1] if rest_BGRS is None else rest_BGRS.flatten(0, 1)
    score = torch.baddbmm(rest, q, k.mT, beta=rest_BGRS is not None, alpha=scale)
    return score.unflatten(0, (batch, groups))


def _weights(score_BGRS: Tensor, sink: float | Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Softmax, the sink, float or [B, G, H/G], beside the keys; 0 where no key is seen."""
    if key_mask is not None:
        key_mask = key_mask[:, None, None]
        score_BGRS = torch.where(key_mask, score_BGRS, torch.finfo(score_BGRS.dtype).min)
    if sink is None:
        weight_BGRS = score_BGRS.softmax(-1)
    else:
        if not isinstance(sink, Tensor):
            sink = score_BGRS.new_full((), sink).expand(score_BGRS.shape[:3])
        weight_BGRS = torch.cat([score_BGRS, sink[..., None]], -1).softmax(-1)[..., :-1]
    return weight_BGRS if key_mask is None else torch.where(key_mask, weight_BGRS, 0.0)


def _log_sum_exp(score_BGRS: Tensor) -> Tensor:
    """torch.logsumexp, by parts that a compiler traces over keys of unknown number too."""
    if not torch.compiler.is_compiling():
        return score_BGRS.logsumexp(-1)
    top = score_BGRS.amax(-1, keepdim=True).detach()
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = torch.exp(score_BGRS - shift).sum(-1, keepdim=True)
    log = torch.log(torch.where(total == 0, 1.0, total))
    return torch.where(total == 0, -torch.inf, shift + log).squeeze(-1)
