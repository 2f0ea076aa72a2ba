"""Attention over PyTorch's stock kernels, with an exact gradient for softmax-1 and for sinks.

Kernels return the output and log-sum-exp of plain softmax. `clearhead.ops.sinks` adds the sink to
both, and the kernel's own backward pass takes the result: the log-sum-exp itself has no gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead.errors import ClearheadError
from clearhead.ops import cuda_sdpa, sinks
from clearhead.ops.coca import Form, coca_keys
from clearhead.ops.dispatch import KERNELS, select_kernel
from clearhead.ops.precision import refuse_second_derivative, without_autocast
from clearhead.ops.requests import PREFIXED, UNROTATED, Call
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sink: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    kernel: str | None = None,
    visibility: Visibility | None = None,
) -> Tensor:
    """Attention: o_i = Σ_j exp(s_ij) v_j / (exp(sink) + Σ_j exp(s_ij)), s_ij = scale · q_i · k_j.

    Args:
        q_BHTD: queries, float64, float32, bfloat16 or float16.
        k_BGSD: keys, G dividing H; query head h reads group h // (H / G).
        v_BGSV: values, of any width V.
        causal: query i of T sees keys up to S − T + i: the queries are those of the last T keys.
        window: a query sees only the keys less than `window` places away; time and memory grow with
            T · window.
        sink: None for softmax; 0.0 for softmax-1 (arXiv 2410.17174); a tensor [H], a logit a head,
            or [B, H, T], a logit a query, which receives its gradient.
        key_mask: bool [B, S], False for padding, which no query sees. The output of its own queries
            is unspecified.
        segments: int [B, S]; a query sees only the keys of its own segment (packed documents).
        prefix: keys [B, G, N, D] and values [B, G, N, V] that every query sees as well.
        scale: 1/√D unless given; of any sign.
        kernel: comma-separated names of `clearhead.ops.dispatch.KERNELS`, tried in order; by
            default the dispatch table chooses.
        visibility: causal, window, key_mask and segments as one value, in their place.

    Returns:
        [B, H, T, V] in the dtype of v. A query that sees no key gets zeros, or the prefix alone.

    Raises:
        ClearheadError: shapes, dtypes or devices that do not fit, or no named kernel serves.
    """
    q, k, v = q_BHTD, k_BGSD, v_BGSV
    if visibility is None:
        visibility = Visibility(causal, window, key_mask, segments)
    check(q, k, v, sink, visibility, prefix)
    queries, keys = q.shape[2], k.shape[2]
    if visibility.window is not None and (first := visibility.earliest(queries, keys)):
        k, v, visibility = k[:, :, first:], v[:, :, first:], visibility.of_keys(first)
        keys -= first
    if visibility.window is not None or queries == 1:  # else it is settled
        visibility = visibility.settled(queries, keys)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:  # kernels want it above 0
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    call, value = Call(q, k, v, scale, visibility), None
    if prefix is not None:
        lone = sink is None and not torch.is_grad_enabled()
        if lone and (name := select_kernel(call, kernel, PREFIXED)):
            with without_autocast(q):
                o: Tensor = KERNELS[name].run.prefixed(call, prefix)
                return o
        # Tokens before the text, which its kernel reads as it reads those. A CPU's compiled tiles
        # take a prefix in without another pass.
        apart = torch.compiler.is_compiling() and not q.is_cuda
        by_query = isinstance(sink, Tensor) and sink.ndim == 3
        hides = visibility.window is not None or visibility.segments is not None
        if 1 < queries == keys and not (apart or hides or by_query):
            q, k, v, _, visibility = _after_tokens(call, prefix)
            options: dict[str, Any] = {"sink": sink, "scale": scale, "kernel": kernel}
            return attend(q, k, v, visibility=visibility, **options)[:, :, prefix[0].shape[2] :]
        sink, value = sinks.as_null(q, prefix, sink, scale)
    if isinstance(sink, float | int):
        sink = torch.full((q.shape[1],), float(sink), device=q.device)
    name = select_kernel(call, kernel, sink=sink is not None)
    if name == "sdpa":
        return cuda_sdpa.attend(call)
    if not torch.is_grad_enabled():
        return _joined(call, sink, value, name)[0]
    if torch.compiler.is_compiling():  # Dynamo takes no tensor for two inputs
        k, v = k.view_as(k), v.view_as(v)
    return _Attend.apply(q, k, v, sink, value, scale, visibility, name)


def _after_tokens(call: Call, prefix: tuple[Tensor, Tensor]) -> Call:
    """The call with the prefix as N tokens before the text, whose queries are 0."""
    q, k, v, scale, visibility = call
    number = prefix[0].shape[2]
    if visibility.key_mask is not None:
        key_mask = pad(visibility.key_mask, (number, 0), value=True)
        visibility = visibility._replace(key_mask=key_mask)
    q = pad(q, (0, 0, number, 0))
    k, v = (torch.cat([own.to(x.dtype), x], 2) for own, x in zip(prefix, (k, v), strict=True))
    return Call(q, k, v, scale, visibility)


def lone_kernel(call: Call, kind: str, kernel: str | None = None) -> tuple[Any, Call]:
    """A kernel for one query of a `kind` other than PLAIN, or None; and the call that it takes."""
    q, k, v, scale, visibility = call
    if q.is_cuda and (first := visibility.earliest(q.shape[2], k.shape[2])):
        k, v, visibility = k[:, :, first:], v[:, :, first:], visibility.of_keys(first)
    call = Call(q, k, v, scale, visibility.settled(q.shape[2], k.shape[2]))
    name = select_kernel(call, kernel, kind)
    return KERNELS[name].run if name else None, call


def attend_unrotated(
    q_BHTD: Tensor,
    t_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    rotation: Rotation,
    form: Form,
    attend: Any,
    visibility: Visibility,
    scale: float,
    sink: float | Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attend` over `coca_keys(t, rotation.table(), form)`, [B, H, T, V] in the dtype of v.

    A kernel may rotate t as it reads. Other arguments are those of `attend`.

    Args:
        q_BHTD: from `coca_queries`.
        t_BGSE: x W_T before the relu, [B, G, S, D/2], as CoCA's keys are cached.
        v_BGSV: values.
        rotation: of the last S keys, or of more.
        form: CoCA's, as in `coca_keys`.
        attend: attention function, called where no kernel reads t.
    """
    q = q_BHTD
    run, call = lone_kernel(Call(q, t_BGSE, v_BGSV, scale, visibility), UNROTATED)
    _, t, v, _, visibility = call
    if run is None or prefix is not None:
        cos, sin = (part[..., -t.shape[2] :, :] for part in rotation.table())
        options: dict[str, Any] = {"sink": sink, "prefix": prefix, "scale": scale}
        o: Tensor = attend(q, coca_keys(t, (cos, sin), form), v, visibility=visibility, **options)
        return o
    if form == "slack":  # q · R [t; t] as q′ · R [t; 0]
        first_half, second_half = q.chunk(2, -1)
        call = call._replace(q=torch.cat([first_half + second_half, second_half - first_half], -1))
    with without_autocast(q):
        o = run.unrotated(call, sink, rotation)
        return o


def at_zero_queries(sink: float | Tensor | None) -> float | Tensor | None:
    """The sink at q = 0, where a logit by query (a product with q) is 0."""
    return 0.0 if isinstance(sink, Tensor) and sink.ndim == 3 else sink


def _joined(
    call: Call, sink: Tensor | None, value: Tensor | None, kernel: str
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with the sink."""
    # Autocast would round the float32 scores that the tiles are careful to keep.
    with without_autocast(call.q):
        o, lse = KERNELS[kernel].run.forward(call)
    return (o, lse) if sink is None else sinks.join(o, lse, sink, value)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        value: Tensor | None,
        scale: float,
        visibility: Visibility,
        kernel: str,
    ) -> Tensor:
        o, lse = _joined(Call(q, k, v, scale, visibility), sink, value, kernel)
        masks = visibility.key_mask, visibility.segments
        ctx.save_for_backward(q, k, v, o, lse, sink, value, *masks)
        ctx.causal, ctx.window, ctx.scale = visibility.causal, visibility.window, scale
        ctx.kernel = kernel
        # Dynamo of torch 2.11 loses the gradient of a tensor that `sinks.join` wrote in place.
        return o.view_as(o) if torch.compiler.is_compiling() else o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        q, k, v, o, lse, sink, value, *masks = ctx.saved_tensors
        call = Call(q, k, v, ctx.scale, Visibility(ctx.causal, ctx.window, *masks))
        dsink = dvalue = None
        with without_autocast(q):
            dq, dk, dv = KERNELS[ctx.kernel].run.backward(call, grad, o, lse)
            if sink is not None and any(ctx.needs_input_grad[3:5]):
                dsink, dvalue = sinks.gradients(sink, value, grad, o, lse)
        return dq, dk, dv, dsink, dvalue, None, None, None


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: float | Tensor | None,
    visibility: Visibility,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Raise a ClearheadError if shapes or dtypes do not fit `attend`."""
    causal, window, key_mask, segments = visibility
    (batch, heads, queries, width), (_, groups, keys, _) = q.shape, k.shape
    fits = k.shape[0] == batch and k.shape[3] == width and v.shape[:3] == k.shape[:3]
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point or not fits:
        found = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
        shapes = "q [B,H,T,D], k [B,G,S,D], v [B,G,S,V]"
        raise ClearheadError(f"{shapes} of one floating dtype do not fit; found {found}")
    if heads % groups:
        raise ClearheadError(f"{heads} query heads cannot share {groups} key heads: give a divisor")
    if queries > keys and (causal or window is not None or segments is not None):
        kinds = "causal, windowed or packed attention"
        raise ClearheadError(f"{kinds} needs at least {queries} keys, one a query; found {keys}")
    if window is not None and window < 1:
        raise ClearheadError(f"window is {window}: it holds at least 1 key, a query's own")
    rows = isinstance(sink, Tensor) and sink.ndim > 1  # a shape in a tuple of two fixes the batch
    if isinstance(sink, Tensor) and sink.shape != ((batch, heads, queries) if rows else (heads,)):
        wanted = f"[{heads}], or a query [{batch}, {heads}, {queries}]"
        raise ClearheadError(f"sink is one logit a head {wanted}; found {tuple(sink.shape)}")
    if key_mask is not None and (key_mask.shape != (batch, keys) or key_mask.dtype != torch.bool):
        found = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise ClearheadError(f"key_mask must be bool [{batch}, {keys}]; found {found}")
    if segments is not None and segments.shape != (batch, keys):
        raise ClearheadError(f"segments must be [{batch}, {keys}]; found {tuple(segments.shape)}")
    if prefix is None:
        return
    number = prefix[0].shape[2] if prefix[0].ndim == 4 else 0
    shapes_of_prefix = (batch, groups, number, width), (batch, groups, number, v.shape[3])
    if number < 1 or (prefix[0].shape, prefix[1].shape) != shapes_of_prefix:
        found = f"{tuple(prefix[0].shape)} and {tuple(prefix[1].shape)}"
        raise ClearheadError(f"a prefix is keys [B,G,N,D] and values [B,G,N,V]; found {found}")
