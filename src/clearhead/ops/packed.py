"""Forward and backward attention as opaque operators: a compiler knows no number of packed tokens.

The efficient kernel's backward pass cannot be traced either: PyTorch 2.13 describes it wrongly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.ops import cuda_efficient, cuda_flash, tiles
from clearhead.ops.packing import Packing, Places, packing
from clearhead.ops.requests import Call, Request
from clearhead.ops.visibility import Visibility

_KERNELS: dict[str, Any] = {"flash": cuda_flash, "efficient": cuda_efficient}


class Operator(NamedTuple):
    """One of `_KERNELS`. Padding sees only padding, or nothing: output 0, log-sum-exp −inf."""

    kernel: str

    def refuses(self, request: Request) -> str | None:
        return _KERNELS[self.kernel].refuses(request._replace(key_mask=False, segments=False))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return _forward(*call[:4], *call.visibility, self.kernel)

    def backward(
        self, call: Call, grad: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(grad, o, lse, *call[:4], *call.visibility, self.kernel)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, float scale, "
    "bool causal, SymInt? window, Tensor? key_mask, Tensor? segments, str kernel"
)


@torch.library.custom_op(
    "clearhead::attend", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, k, v, scale, *masks, kernel = inputs
    call = Call(q, k, v, scale, visibility := Visibility(*masks))
    batch, _, queries, _ = q.shape
    run, texts = _serving(kernel, visibility, queries)
    if texts is None:
        o, lse = run.forward(call)
        return _tokens_first(o), _as_kept(lse, visibility.masked)
    q, k, v = _taken(q, texts.of_queries), *(_taken(x, texts.of_keys) for x in (k, v))
    o, lse = run.forward(call._replace(q=q, k=k, v=v), texts)
    o_BHTV, lse_HN = _put(o, texts.of_queries, batch, queries), lse[0]
    if texts.of_queries is None:
        lse_HBT = lse_HN.contiguous().unflatten(1, (batch, queries))
    else:
        lse_HBT = lse.new_full((len(lse_HN), batch, queries), -torch.inf)
        lse_HBT[:, *texts.of_queries] = lse_HN
    return o_BHTV, _as_kept(lse_HBT.transpose(0, 1), True)


@torch.library.custom_op(
    "clearhead::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor o, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(grad: Tensor, o: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, scale, *masks, kernel = inputs
    call = Call(q, k, v, scale, visibility := Visibility(*masks))
    batch, queries, keys = len(q), q.shape[2], k.shape[2]
    run, texts = _serving(kernel, visibility, queries)
    if texts is None:
        dq, dk, dv = map(_tokens_first, run.backward(call, grad, o, lse))
        return dq, dk, dv
    grad, q, o = (_taken(x, texts.of_queries) for x in (grad, q, o))
    lse_HBT = lse.transpose(0, 1)
    lse_HN = lse_HBT.flatten(1) if texts.of_queries is None else lse_HBT[:, *texts.of_queries]
    k, v = (_taken(x, texts.of_keys) for x in (k, v))
    dq, dk, dv = run.backward(call._replace(q=q, k=k, v=v), grad, o, lse_HN[None], texts)
    dk, dv = (_put(x, texts.of_keys, batch, keys) for x in (dk, dv))
    return _put(dq, texts.of_queries, batch, queries), dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    o_BTHV = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3])
    masked = any(isinstance(option, Tensor) for option in options)
    return o_BTHV.transpose(1, 2), _as_kept(q.new_empty(q.shape[:3], dtype=exact), masked)


@_backward.register_fake
def _(grad: Tensor, o: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(len(x), x.shape[2], x.shape[1], x.shape[3]) for x in inputs[:3])
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _serving(kernel: str, visibility: Visibility, queries: int) -> tuple[Any, Packing | None]:
    """The kernel, and its texts; `tiles` for a window over texts with gaps, which it counts."""
    run = _KERNELS[kernel]
    if not visibility.masked:
        return run, None
    texts = packing(visibility.key_mask, visibility.segments, queries)
    return (run, texts) if visibility.window is None or texts.gapless else (tiles, None)


def _taken(x_BHTD: Tensor, places: Places | None) -> Tensor:
    """[B, H, T, D] → [1, H, N, D], the tokens at `places` as one row."""
    x_BTHD = x_BHTD.transpose(1, 2)
    x_NHD = x_BTHD.flatten(0, 1) if places is None else x_BTHD[places]
    return x_NHD[None].transpose(1, 2)


def _put(x_1HND: Tensor, places: Places | None, batch: int, length: int) -> Tensor:
    """[1, H, N, D] → [B, H, T, D], the gradient of `_taken`; 0 for the other tokens."""
    x_NHD = x_1HND.transpose(1, 2)[0]
    if places is None:
        return x_NHD.contiguous().unflatten(0, (batch, length)).transpose(1, 2)
    whole = x_NHD.new_zeros(batch, length, *x_NHD.shape[1:])
    whole[places] = x_NHD
    return whole.transpose(1, 2)


def _tokens_first(x_BHTD: Tensor) -> Tensor:
    """In the memory order that the operators promise, [B, T, H, D]."""
    return x_BHTD.transpose(1, 2).contiguous().transpose(1, 2)


def _as_kept(lse_BHT: Tensor, masked: bool) -> Tensor:
    """With masks heads first in memory, as packed kernels have it: then nothing is copied."""
    if not masked:
        return lse_BHT.contiguous()
    return lse_BHT.transpose(0, 1).contiguous().transpose(0, 1)
