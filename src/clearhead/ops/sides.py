"""Attention whose scores before a query's own place and after it come from different vectors.

A penalty on |i − j| is no sum of products of columns, and a factor ζ^|i−j| no product of one of i
and one of j; on one side of i each is. So the keys up to a query's own are one causal pass of a
kernel, the later ones another over the text reversed, and the two are merged by log-sum-exp. As in
`clearhead.ops.attention`, the exact gradient of a pass is the kernel's own backward given the
*merged* output and log-sum-exp. Two causal passes do the work of one that sees everything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.ops import higher_order, oracles
from clearhead.ops.kernels import Options, chosen, sink_gradient


class _Pass(NamedTuple):
    """One side, as a kernel is asked for it."""

    kernel: Any
    tensors: tuple[Tensor, Tensor, Tensor]
    options: Options


class AttendBySide(torch.autograd.Function):
    """What `attend` does with `by_side`, for two tokens or more.

    `earlier_q` and `earlier_k` score the keys up to a query's own, `later_q` and `later_k` those
    after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        earlier_q: Tensor,
        later_q: Tensor,
        earlier_k: Tensor,
        later_k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        options: Options,
    ) -> Tensor:
        tensors = earlier_q, later_q, earlier_k, later_k, v
        with torch.autocast(v.device.type, enabled=False):
            earlier, later = _passes(options, *tensors)
            earlier_o, earlier_lse = _run(earlier)
            later_o, later_lse = _run(later)
            later_o = _rows_back(later_o, 0.0)
            later_lse = _rows_back(later_lse, -torch.inf)
            lse = torch.logaddexp(earlier_lse, later_lse)
            if sink is not None:
                lse = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
            lse = torch.where(lse == -torch.inf, 0.0, lse)  # a row without a key stays 0
            o = earlier_o * torch.exp(earlier_lse - lse)[..., None]
            o = o + later_o * torch.exp(later_lse - lse)[..., None]
        # Not a cast that casts nothing: torch 2.11 compiles that into gradients of zero.
        o = o if o.dtype == v.dtype else o.to(v.dtype)
        ctx.save_for_backward(*tensors, o, lse, sink, *options[2:])
        ctx.causal, ctx.scale = options.causal, options.scale
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, o, lse, sink, key_mask, query_segments, key_segments = ctx.saved_tensors
        options = Options(ctx.causal, ctx.scale, key_mask, query_segments, key_segments)
        if higher_order.requested():

            def plain(*inputs: Any) -> Tensor:
                earlier_q, later_q, earlier_k, later_k, v, sink = inputs
                q, k = torch.cat([earlier_q, later_q], -1), torch.cat([earlier_k, later_k], -1)
                return oracles.attend(q, k, v, sink=sink, by_side=True, **options.of_oracle())

            inputs, needed = (*tensors, sink), ctx.needs_input_grad[:6]
            return *higher_order.gradients(plain, inputs, needed, grad), None
        with torch.autocast(grad.device.type, enabled=False):
            earlier, later = _passes(options, *tensors)
            dq, dk, dv = _differentiate(earlier, grad, o, lse)
            later_dq, later_dk, later_dv = _differentiate(later, *map(_rows, (grad, o, lse)))
            dsink = None
            if sink is not None and ctx.needs_input_grad[5]:
                dsink = sink_gradient(sink, grad, o, lse)
        later_dq = _rows_back(later_dq, 0.0)
        return dq, later_dq, dk, _keys_back(later_dk), dv + _keys_back(later_dv), dsink, None


def _passes(
    options: Options,
    earlier_q: Tensor,
    later_q: Tensor,
    earlier_k: Tensor,
    later_k: Tensor,
    v: Tensor,
) -> tuple[_Pass, _Pass]:
    """Reversed, without the last token's row and the first token's key, later is causal too."""
    earlier = earlier_q, earlier_k, v
    later = _rows(later_q), _keys(later_k), _keys(v)
    _, scale, key_mask, query_segments, key_segments = options
    there = Options(
        causal=True,
        scale=scale,
        key_mask=None if key_mask is None else key_mask[:, 1:].flip(1),
        query_segments=None if query_segments is None else query_segments[:, :-1].flip(1),
        key_segments=None if key_segments is None else key_segments[:, 1:].flip(1),
    )
    here = options._replace(causal=True)
    return (
        _Pass(chosen(*earlier, here), earlier, here),
        _Pass(chosen(*later, there), later, there),
    )


def _run(side: _Pass) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp: −inf where a row sees padding only (CPU flash says 0)."""
    o, lse = side.kernel.forward(*side.tensors, **side.options._asdict())
    if side.options.key_mask is not None:
        seen_BT = side.options.key_mask.cumsum(1) > 0
        lse = torch.where(seen_BT[:, None], lse, -torch.inf)
    return o, lse


def _differentiate(side: _Pass, grad: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return side.kernel.backward(grad, *side.tensors, o, lse, **side.options._asdict())


def _rows(x_BHT: Tensor) -> Tensor:
    """[B, H, T, ...] → [B, H, T − 1, ...]: what queries that have later keys own, reversed."""
    return x_BHT[:, :, :-1].flip(2)


def _rows_back(x_BHT: Tensor, last: float) -> Tensor:
    return torch.cat([x_BHT.flip(2), torch.full_like(x_BHT[:, :, :1], last)], 2)


def _keys(x_BGSD: Tensor) -> Tensor:
    """[B, G, S, D] → [B, G, S − 1, D]: the keys that are later than some query, reversed."""
    return x_BGSD[:, :, 1:].flip(2)


def _keys_back(x_BGSD: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x_BGSD[:, :, :1]), x_BGSD.flip(2)], 2)
