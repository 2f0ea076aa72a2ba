"""Every operation again, in float64, straight from its formula: slow, plain, and independent.

An oracle has the signature of the operation it judges, but for the options that only choose a
code path. None of them shares a line with the fast paths; each may hold whole T × T matrices.
Shapes: B batch, H query heads, G key/value heads, T queries, S keys, D key width, V value width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Visible keys of each query, bool [B or 1, 1, T, S]; queries are the last of the keys."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed & (torch.arange(keys, device=device)[None, :] <= position)
    if window is not None:
        distance = position - torch.arange(keys, device=device)[None, :]
        allowed = allowed & (distance.abs() < window)
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
    window: int | None = None,
    sink: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention weights, float64 [B, H, T, S]: exp(s) / (exp(sink) + Σ exp(s)), no sink: softmax.

    Those on a prefix's keys come first, [B, H, T, N + S].

    The shift by max(0-or-sink, max s) keeps every exponent at or below 0; a row that sees no key
    is zero.
    """
    q, k = q_BHTD.double(), _beside(prefix, 0, k_BGSD)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = visible(
        q.shape[2],
        k_BGSD.shape[2],
        causal=causal,
        window=window,
        key_mask=key_mask,
        segments=segments,
        device=q.device,
    )
    before = scores.shape[-1] - allowed.shape[-1]
    allowed = torch.nn.functional.pad(allowed, (before, 0), value=True)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is None:
        shift = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        numerator = torch.exp(scores - shift)
        total = numerator.sum(-1, keepdim=True)
        return numerator / total.clamp_min(torch.finfo(torch.float64).tiny)
    null = torch.as_tensor(sink, dtype=torch.float64, device=q.device)
    null = null[..., None] if null.ndim == 3 else null.reshape(1, -1, 1, 1)
    shift = torch.maximum(scores.detach().amax(-1, keepdim=True), null.detach())
    numerator = torch.exp(scores - shift)
    return numerator / (torch.exp(null - shift) + numerator.sum(-1, keepdim=True))


def softpick_weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    scale: float,
    sink: None = None,
    prefix: None = None,
    **masks: Any,
) -> Tensor:
    """relu(e^s − 1) / Σ |e^s − 1|, float64 [B, H, T, S] (arXiv 2504.20966); 0/0 is 0.

    Scores above 700 overflow.
    """
    k = k_BGSD.double().repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    scores = q_BHTD.double() @ k.mT * scale
    seen = visible(*scores.shape[2:], device=scores.device, **masks)
    term = scores.masked_fill(~seen, 0).exp() - 1
    total = term.abs().sum(-1, keepdim=True)
    return term.clamp_min(0) / total.masked_fill(total == 0, 1)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    by: Callable[..., Tensor] = weights,
    **options: object,
) -> Tensor:
    """Attention, float64 [B, H, T, V]; options as for `weights`, which `by` replaces."""
    v = _beside(options.get("prefix"), 1, v_BGSV)
    v = v.repeat_interleave(q_BHTD.shape[1] // v.shape[1], dim=1)
    return by(q_BHTD, k_BGSD, **options) @ v


def _beside(prefix: object, index: int, x_BGSN: Tensor) -> Tensor:
    """Keys (0) or values (1), float64, after a prefix's."""
    x = x_BGSN.double()
    return torch.cat([prefix[index].double(), x], 2) if isinstance(prefix, tuple) else x


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
    v_BGSD = _beside(options.get("prefix"), 1, v_BGSD)
    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        first, second = (
            weights(
                q_BHTD[:, [2 * head + m]],
                k_BGSD[:, [2 * group + m]],
                **_for_head(options, 2 * head + m, 2 * group + m),  # type: ignore[arg-type]
            )
            for m in (0, 1)
        )
        value = torch.cat([v_BGSD[:, [2 * group]], v_BGSD[:, [2 * group + 1]]], -1)
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
    v_BGSD = _beside(options.get("prefix"), 1, v_BGSD)
    outputs = []
    for head in range(heads):
        group = [head * k_BGSD.shape[1] // heads]
        first, second = (
            weights(
                q_BHTD[:, [2 * head + m]],
                k_BGSD[:, group],
                **_for_head(options, 2 * head + m, group[0]),  # type: ignore[arg-type]
            )
            for m in (0, 1)
        )
        outputs.append((first - lam[:, [head]].double() * second) @ v_BGSD[:, group])
    return torch.cat(outputs, 1)


def _for_head(options: dict[str, object], head: int, group: int) -> dict[str, object]:
    sink, prefix = options.get("sink"), options.get("prefix")
    if isinstance(prefix, tuple):
        options = {**options, "prefix": tuple(x[:, [group]] for x in prefix)}
    if not isinstance(sink, Tensor) or not sink.ndim:
        return options
    return {**options, "sink": sink[:, [head]] if sink.ndim == 3 else sink[head]}


def running_mean(
    x_BHSD: Tensor,
    queries: int,
    *,
    causal: bool = True,
    window: int | None = None,
    **masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """C x and the number of visible keys, float64, from the T × S matrix of uniform weights."""
    keys, device = x_BHSD.shape[2], x_BHSD.device
    seen = visible(queries, keys, causal=causal, window=window, device=device, **masks).double()
    count = seen.sum(-1, keepdim=True)
    return seen / count.clamp_min(1) @ x_BHSD.double(), count[:, 0, :, 0]


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


def coca_scores(
    q_BHTD: Tensor, t_BGSE: Tensor, queries_BT: Tensor, keys_BS: Tensor, theta: float, form: str
) -> Tensor:
    """CoCA's scores times √D, float64 [B, H, T, S], from every q_m ∘ t_n: N × N × D numbers.

    Exact and strict are equation 9 of arXiv 2309.08646, Re⟨f(q_m, m), f(q_m, n) ∘ t_n⟩; slack is
    equation 10, Re⟨f(q_m, m), q_m ∘ f(t_n, n)⟩, without its constraint on q. f turns a vector by
    its position, t has both halves of a pair alike. A strict q is one half, [B, H, T, D/2].
    """
    q, t = q_BHTD.double(), t_BGSE.double().clamp_min(0)
    q = torch.cat([q, q], -1) if form == "strict" else q
    t = torch.cat([t, t], -1).repeat_interleave(q.shape[1] // t.shape[1], 1)
    batch, heads, queries, width = q.shape
    keys = t.shape[2]
    q_BHTSD = q[:, :, :, None].expand(batch, heads, queries, keys, width)
    t_BHTSD = t[:, :, None].expand(batch, heads, queries, keys, width)
    own = queries_BT[:, :, None].expand(batch, queries, keys)
    other = keys_BS[:, None].expand(batch, queries, keys)

    def f(x_BHTSD: Tensor, at_BTS: Tensor) -> Tensor:
        return rotate(x_BHTSD.flatten(2, 3), at_BTS.flatten(1), theta).view_as(x_BHTSD)

    if form == "slack":
        return (f(q_BHTSD, own) * (q_BHTSD * f(t_BHTSD, other))).sum(-1)
    return (f(q_BHTSD, own) * (f(q_BHTSD, other) * t_BHTSD)).sum(-1)


def pope_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    delta_GD: Tensor,
    queries_BT: Tensor,
    keys_BS: Tensor,
    theta: float,
) -> Tensor:
    """Σ_c softplus(q_c) softplus(k_c) cos((n − m) θ^(−c/D) + δ_c), float64 [B, H, T, S].

    As arXiv 2509.10534 has it, times √D; δ is within [−2π, 0].
    """
    width, shared = q_BHTD.shape[-1], q_BHTD.shape[1] // k_BGSD.shape[1]
    k, delta = k_BGSD.repeat_interleave(shared, 1), delta_GD.repeat_interleave(shared, 0)
    q, k = (torch.log1p(x.double().exp()) for x in (q_BHTD, k))
    distance = keys_BS[:, None, None, :].double() - queries_BT[:, None, :, None].double()
    scores = torch.zeros((), dtype=torch.float64)
    for c in range(width):
        angle = distance * theta ** (-c / width) + delta[:, None, None, c].double()
        scores = scores + q[:, :, :, None, c] * k[:, :, None, :, c] * angle.cos()
    return scores


def alibi_bias(queries_BT: Tensor, keys_BS: Tensor, heads: int) -> Tensor:
    """−slope_h · (i − j), float64 [B, H, T, S] (arXiv 2108.12409)."""
    whole = 1 << (heads.bit_length() - 1)
    ratio, half = 2 ** (-8 / whole), 2 ** (-4 / whole)
    slopes = [ratio ** (h + 1) for h in range(whole)]
    slopes += [half ** (2 * h + 1) for h in range(heads - whole)]
    distance = queries_BT[:, None, :, None].double() - keys_BS[:, None, None, :].double()
    return -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance


def forget_bias(log_gates_BHS: Tensor, queries: int) -> Tensor:
    """Σ over j < l ≤ i of log f_l, float64 [B, H, T, S]; i the last keys (arXiv 2503.02130)."""
    key = torch.arange(log_gates_BHS.shape[-1], device=log_gates_BHS.device)
    i, j, of = key[-queries:, None, None], key[:, None], key
    between_TSS = ((j < of) & (of <= i)).double()
    return torch.einsum("tsl,bhl->bhts", between_TSS, log_gates_BHS.double())


def xpos_scores(
    q_BHTD: Tensor, k_BHSD: Tensor, queries_BT: Tensor, keys_BS: Tensor, theta: float
) -> Tensor:
    """Σ_j Re(q_j k̄_j e^(i(m−n)θ_j)) ζ_j^((m−n)/512), float64 [B, H, T, S] (arXiv 2212.10554)."""
    half = q_BHTD.shape[-1] // 2
    q = torch.complex(q_BHTD[..., :half].double(), q_BHTD[..., half:].double())[:, :, :, None]
    k = torch.complex(k_BHSD[..., :half].double(), k_BHSD[..., half:].double())[:, :, None]
    pair = torch.arange(half, dtype=torch.float64)
    zeta = (pair / half + 0.4) / 1.4
    distance = queries_BT[:, None, :, None, None].double() - keys_BS[:, None, None, :, None]
    turn = torch.polar(zeta ** (distance / 512), distance * theta ** (-pair / half))
    return (q * k.conj() * turn).real.sum(-1)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Σ over the kept rows of −log softmax(x Wᵀ)[target], float64 scalar."""
    kept = target_N != ignore_index
    logits = x_ND.double()[kept] @ weight_VD.double().T
    picked = logits.gather(1, target_N[kept][:, None]).squeeze(1)
    return (torch.logsumexp(logits, -1) - picked).sum()


def rotate_blocks(x: Tensor, block: int) -> Tensor:
    """x H / √block in blocks of channels, float64, H_ij = (−1)^(ones in the binary i AND j)."""
    index = range(block)
    signs = [[(-1.0) ** (i & j).bit_count() for j in index] for i in index]
    matrix = torch.tensor(signs, dtype=torch.float64, device=x.device) * block**-0.5
    return (x.double().unflatten(-1, (-1, block)) @ matrix).flatten(-2)
