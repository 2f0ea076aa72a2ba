"""Every operation again, in float64, straight from its formula: slow, plain, and independent.

An oracle has the signature of the operation it judges, but for the options that only choose a
code path. None of them shares a line with the fast paths; each may hold whole T × T matrices.
Shapes: B batch, H query heads, G key/value heads, T queries, S keys, D key width, V value width.
"""

import torch
from torch import Tensor


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Which key each query may see, as bool [B or 1, 1, T, S]; queries are the last of the keys."""
    position = torch.arange(queries)[:, None] + (keys - queries)
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if causal:
        allowed = allowed & (torch.arange(keys)[None, :] <= position)
    if key_mask is not None:
        allowed = allowed & key_mask.bool()[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, -queries:, None] == segments[:, None, None, :])
    return allowed


def weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    causal: bool = True,
    sink: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention weights, float64 [B, H, T, S]: exp(s) / (exp(sink) + Σ exp(s)), no sink: softmax.

    The shift by max(0-or-sink, max s) keeps every exponent at or below 0; a row that sees no key
    is zero.
    """
    q, k = q_BHTD.double(), k_BGSD.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = visible(
        q.shape[2], k.shape[2], causal=causal, key_mask=key_mask, segments=segments
    ).to(q.device)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is None:
        shift = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        numerator = torch.exp(scores - shift)
        total = numerator.sum(-1, keepdim=True)
        return numerator / total.clamp_min(torch.finfo(torch.float64).tiny)
    sink_1H11 = torch.as_tensor(sink, dtype=torch.float64, device=q.device).reshape(1, -1, 1, 1)
    shift = torch.maximum(scores.detach().amax(-1, keepdim=True), sink_1H11.detach())
    numerator = torch.exp(scores - shift)
    return numerator / (torch.exp(sink_1H11 - shift) + numerator.sum(-1, keepdim=True))


def attend(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, **options: object) -> Tensor:
    """Attention, float64 [B, H, T, V]; options as for `weights`."""
    v = v_BGSV.double().repeat_interleave(q_BHTD.shape[1] // v_BGSV.shape[1], dim=1)
    return weights(q_BHTD, k_BGSD, **options) @ v  # type: ignore[arg-type]


def differential(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lam: Tensor,
    *,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    gain: float,
    **options: object,
) -> Tensor:
    """Differential attention, float64 [B, H/2, T, 2D] (arXiv 2410.05258, eqs. 1 and 3).

    Head i owns the neighbouring pair of queries (2i, 2i+1), of keys and of value halves; under
    grouped queries head i uses the keys and value of group i // (H/G), as the authors' flash files
    do (their naive file pairs the wrong keys).
    """
    heads, groups = q_BHTD.shape[1] // 2, k_BGSD.shape[1] // 2
    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        first, second = (
            weights(
                q_BHTD[:, [2 * head + m]],
                k_BGSD[:, [2 * group + m]],
                **_for_head(options, 2 * head + m),  # type: ignore[arg-type]
            )
            for m in (0, 1)
        )
        value = torch.cat([v_BGSD[:, [2 * group]], v_BGSD[:, [2 * group + 1]]], -1).double()
        outputs.append((first - lam.double() * second) @ value)
    o = torch.cat(outputs, 1)
    if norm_eps is None:
        return gain * o
    o = o / torch.sqrt(o.pow(2).mean(-1, keepdim=True) + norm_eps)
    return gain * (o if norm_weight is None else o * norm_weight.double())


def differential_v2(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, lam: Tensor, **options: object
) -> Tensor:
    """Differential attention V2, float64 [B, H/2, T, D]: maps 2i and 2i+1 make head i.

    With r = H/2 / G heads a group, both read keys and values of group i // r. lam: [B, H/2, T, 1].
    """
    heads = q_BHTD.shape[1] // 2
    outputs = []
    for head in range(heads):
        group = [head * k_BGSD.shape[1] // heads]
        first, second = (
            weights(
                q_BHTD[:, [2 * head + m]],
                k_BGSD[:, group],
                **_for_head(options, 2 * head + m),  # type: ignore[arg-type]
            )
            for m in (0, 1)
        )
        outputs.append((first - lam[:, [head]].double() * second) @ v_BGSD[:, group].double())
    return torch.cat(outputs, 1)


def _for_head(options: dict[str, object], head: int) -> dict[str, object]:
    sink = options.get("sink")
    return {**options, "sink": sink[head]} if isinstance(sink, Tensor) and sink.ndim else options


def rotate(x_BHTD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers, float64: z_j · exp(i · position · theta^(−2j/D)).

    z_j = x_j + i · x_(j+D/2), the half-split layout of transformers' Llama (arXiv 2104.09864).
    """
    half = x_BHTD.shape[-1] // 2
    z = torch.complex(x_BHTD[..., :half].double(), x_BHTD[..., half:].double())
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x_BHTD.device) / half)
    angle = positions_BT.double()[:, None, :, None] * frequency
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Σ over the kept rows of −log softmax(x Wᵀ)[target], float64 scalar."""
    kept = target_N != ignore_index
    logits = x_ND.double()[kept] @ weight_VD.double().T
    picked = logits.gather(1, target_N[kept][:, None]).squeeze(1)
    return (torch.logsumexp(logits, -1) - picked).sum()
