"""Every operation in float64, straight from its formula; attention as `ops` itself has it."""

import torch
from torch import Tensor

from clearhead.ops.oracles import attend, visible, weights

__all__ = ["attend", "visible", "weights"]


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

    Head i owns the queries 2i and 2i+1, and the pair i // (H/G) of keys and value halves, as in the
    authors' flash files (their naive file pairs the wrong keys).
    """
    pairs, shared = q_BHTD.shape[1] // 2, q_BHTD.shape[1] // k_BGSD.shape[1]
    keys = [2 * (head // shared) + m for head in range(pairs) for m in (0, 1)]
    prefix = options.get("prefix")
    v = _beside(prefix, v_BGSD)
    if prefix is not None:
        options["prefix"] = tuple(x[:, keys] for x in prefix)
    maps = weights(q_BHTD, k_BGSD[:, keys], **options)
    value = torch.cat([v[:, keys[0::2]], v[:, keys[1::2]]], -1)
    o = (maps[:, 0::2] - lam.double() * maps[:, 1::2]) @ value
    if norm_eps is None:
        return gain * o
    o = o / torch.sqrt(o.pow(2).mean(-1, keepdim=True) + norm_eps)
    return gain * (o if norm_weight is None else o * norm_weight.double())


def differential_v2(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, lam: Tensor, **options: object
) -> Tensor:
    """Float64 [B, H/2, T, D]: maps 2i and 2i+1, over one group's keys and values, make head i."""
    maps = weights(q_BHTD, k_BGSD, **options)
    v = _beside(options.get("prefix"), v_BGSD)
    heads = q_BHTD.shape[1] // 2
    group = [head * k_BGSD.shape[1] // heads for head in range(heads)]
    return (maps[:, 0::2] - lam.double() * maps[:, 1::2]) @ v[:, group]


def _beside(prefix: object, v_BGSD: Tensor) -> Tensor:
    """The values, float64, after a prefix's."""
    values = [v_BGSD] if prefix is None else [prefix[1], v_BGSD]
    return torch.cat([x.double() for x in values], 2)


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
    """z_j · exp(i · position · theta^(−2j/D)), float64, z_j = x_j + i · x_(j+D/2)."""
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
    equation 10, Re⟨f(q_m, m), q_m ∘ f(t_n, n)⟩. A strict q is one half, [B, H, T, D/2].
    """
    q, t = q_BHTD.double(), t_BGSE.double().clamp_min(0)
    q = torch.cat([q, q], -1) if form == "strict" else q
    t = torch.cat([t, t], -1).repeat_interleave(q.shape[1] // t.shape[1], 1)
    q_BHTSD, t_BHTSD = torch.broadcast_tensors(q[:, :, :, None], t[:, :, None])
    batch, _, queries, keys, _ = q_BHTSD.shape
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
    """Σ_c softplus(q_c) softplus(k_c) cos((n − m) θ^(−c/D) + δ_c), float64 (arXiv 2509.10534)."""
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
