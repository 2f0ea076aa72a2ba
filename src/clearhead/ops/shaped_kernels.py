"""Triton kernels of `clearhead.ops.shaped_fused`, which alone imports this file: it needs Triton.

A program has one text and BLOCK_C neighbouring channels, whichever heads they are of, and walks the
tokens in blocks of BLOCK_T with a carried sum: every number is read and written once. Arithmetic is
in float32 whatever the dtypes.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x_BTC: tl.tensor,
    o_BTC: tl.tensor,
    alpha_H: tl.tensor,
    beta_H: tl.tensor,
    gamma_H: tl.tensor,
    out_BTC: tl.tensor,
    length: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """out = α x + β o − γ m, m_t = Σ_{s ≤ t} x_s / t, tokens counted from 1."""
    blocks = tl.cdiv(channels, BLOCK_C)
    text = (tl.program_id(0) // blocks).to(tl.int64) * length * channels
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    alpha = tl.load(alpha_H + c // width, mask=inside, other=0).to(tl.float32)
    beta = tl.load(beta_H + c // width, mask=inside, other=0).to(tl.float32)
    gamma = tl.load(gamma_H + c // width, mask=inside, other=0).to(tl.float32)
    before = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, length, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = text + t.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (t < length)[:, None] & inside[None, :]
        x = tl.load(x_BTC + at, mask=mask, other=0).to(tl.float32)
        o = tl.load(o_BTC + at, mask=mask, other=0).to(tl.float32)
        mean = (before[None, :] + tl.cumsum(x, 0)) * (1.0 / (t + 1))[:, None]
        before += tl.sum(x, 0)
        out = alpha[None, :] * x + beta[None, :] * o - gamma[None, :] * mean
        tl.store(out_BTC + at, out.to(out_BTC.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    grad_BTC: tl.tensor,
    x_BTC: tl.tensor,
    o_BTC: tl.tensor,
    alpha_H: tl.tensor,
    beta_H: tl.tensor,
    gamma_H: tl.tensor,
    dx_BTC: tl.tensor,
    do_BTC: tl.tensor,
    gains_3BC: tl.tensor,
    batch: tl.tensor,
    length: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """dx = α g − γ r, do = β g, r_s = Σ_{t ≥ s} g_t / t, from the last token to the first.

    The gains' gradients are left as sums over the tokens, by text and channel: Σ g x, Σ g o and
    −Σ_t g_t m_t, which is −Σ_s x_s r_s: no mean is made a second time.
    """
    blocks = tl.cdiv(channels, BLOCK_C)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    alpha = tl.load(alpha_H + c // width, mask=inside, other=0).to(tl.float32)
    beta = tl.load(beta_H + c // width, mask=inside, other=0).to(tl.float32)
    gamma = tl.load(gamma_H + c // width, mask=inside, other=0).to(tl.float32)
    after = tl.zeros([BLOCK_C], dtype=tl.float32)
    dalpha = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    dbeta = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    dgamma = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for start in range(0, length, BLOCK_T):
        # Counted from the end, so that what follows a token is what a scan has already passed.
        t = length - 1 - start - tl.arange(0, BLOCK_T)
        at = row * length * channels + t.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (t >= 0)[:, None] & inside[None, :]
        grad = tl.load(grad_BTC + at, mask=mask, other=0).to(tl.float32)
        x = tl.load(x_BTC + at, mask=mask, other=0).to(tl.float32)
        o = tl.load(o_BTC + at, mask=mask, other=0).to(tl.float32)
        share = grad * (1.0 / tl.maximum(t + 1, 1))[:, None]
        reach = after[None, :] + tl.cumsum(share, 0)
        after += tl.sum(share, 0)
        dx = alpha[None, :] * grad - gamma[None, :] * reach
        tl.store(dx_BTC + at, dx.to(dx_BTC.dtype.element_ty), mask=mask)
        tl.store(do_BTC + at, (beta[None, :] * grad).to(do_BTC.dtype.element_ty), mask=mask)
        dalpha += grad * x
        dbeta += grad * o
        dgamma -= x * reach
    place = row * channels + c
    tl.store(gains_3BC + place, tl.sum(dalpha, 0), mask=inside)
    tl.store(gains_3BC + batch * channels + place, tl.sum(dbeta, 0), mask=inside)
    tl.store(gains_3BC + 2 * batch * channels + place, tl.sum(dgamma, 0), mask=inside)
