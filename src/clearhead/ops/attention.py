"""Attention over PyTorch's stock kernels, with an exact gradient for softmax-1 and for sinks.

`clearhead.ops.dispatch` chooses the kernel: on CUDA PyTorch's own call if there is neither a sink
nor a prefix. Other kernels return the output o and log-sum-exp of plain softmax;
`clearhead.ops.sinks` adds the sink to both, and the kernel's own backward pass takes the result.
Differentiating o · sigmoid(lse) instead is silently wrong: the kernels' lse has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops import cuda_sdpa, sinks
from clearhead.ops.coca import Form, coca_keys
from clearhead.ops.dispatch import KERNELS, select_kernel
from clearhead.ops.precision import refuse_second_derivative, without_autocast
from clearhead.ops.requests import PREFIXED, UNROTATED, Saved
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
) -> Tensor:
    """Attention: o_i = Σ_j exp(s_ij) v_j / (exp(sink) + Σ_j exp(s_ij)), s_ij = scale · q_i · k_j.

    Args:
        q_BHTD: queries, float64, float32, bfloat16 or float16.
        k_BGSD: keys, G dividing H; query head h reads group h // (H / G).
        v_BGSV: values, of any width V.
        causal: query i of T sees the keys up to S − T + i (the queries are the last of the keys).
        window: a query sees only the keys less than `window` places away; time and memory grow with
            T · window.
        sink: None for softmax; 0.0 for softmax-1 (arXiv 2410.17174); a tensor [H], a logit a head,
            or [B, H, T], a logit a query, which receives its gradient.
        key_mask: bool [B, S], False for keys that nobody sees (padding). The output of their own
            queries is unspecified.
        segments: int [B, S]; a query sees only the keys of its own segment (packed documents).
        prefix: keys [B, G, N, D] and values [B, G, N, V] that every query sees as well.
        scale: 1/√D unless given; of any sign.
        kernel: comma-separated names of `clearhead.ops.dispatch.KERNELS`, tried in order; by
            default the dispatch table chooses.

    Returns:
        [B, H, T, V] in the dtype of v. A query that sees no key gets zeros, or the prefix alone.

    Raises:
        ClearheadError: shapes, dtypes or devices that do not fit, or no named kernel serves.
    """
    visibility = Visibility(causal, window, key_mask, segments)
    options: dict[str, Any] = {"sink": sink, "prefix": prefix, "scale": scale, "kernel": kernel}
    return attend_visible(q_BHTD, k_BGSD, v_BGSV, visibility=visibility, **options)


def attend_visible(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    visibility: Visibility,
    sink: float | Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`attend` with its masks as one `Visibility`."""
    check(q_BHTD, k_BGSD, v_BGSV, sink, visibility)
    queries, keys = q_BHTD.shape[2], k_BGSD.shape[2]
    if visibility.window is not None and (first := visibility.earliest(queries, keys)):
        k_BGSD, v_BGSV = k_BGSD[:, :, first:], v_BGSV[:, :, first:]
        visibility, keys = visibility.of_keys(first), keys - first
    if visibility.window is not None or queries == 1:  # else it is settled
        visibility = visibility.settled(queries, keys)
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:  # kernels want it above 0
        q_BHTD, scale = (-q_BHTD, -scale) if scale else (q_BHTD * 0, 1.0)
    value = None
    if prefix is not None:
        _check_prefix(prefix, k_BGSD, v_BGSV)
        given = q_BHTD, k_BGSD, v_BGSV
        name = ""
        if sink is None and not torch.is_grad_enabled():
            name = select_kernel(*given, visibility, kernel, PREFIXED)
        if name:
            with without_autocast(q_BHTD):
                run = KERNELS[name].run
                return run.prefixed(*given, prefix, scale=scale, visibility=visibility)
        # Tokens before the text, which its kernel reads as it reads those. A CPU's compiled tiles
        # take a prefix in without another pass.
        apart = torch.compiler.is_compiling() and not q_BHTD.is_cuda
        by_query = isinstance(sink, Tensor) and sink.ndim == 3
        hides = visibility.window is not None or visibility.segments is not None
        if 1 < queries == keys and not (apart or hides or by_query):
            number = prefix[0].shape[2]
            q, k, v, visibility = _after_tokens(*given, prefix, visibility)
            options: dict[str, Any] = {"sink": sink, "scale": scale, "kernel": kernel}
            return attend_visible(q, k, v, visibility=visibility, **options)[:, :, number:]
        sink, value = sinks.as_null(q_BHTD, prefix, sink, scale)
    if isinstance(sink, float | int):
        sink = torch.full((q_BHTD.shape[1],), float(sink), device=q_BHTD.device)
    inputs = q_BHTD, k_BGSD, v_BGSV
    name = select_kernel(*inputs, visibility, kernel, sink=sink is not None)
    if name == "sdpa":
        return cuda_sdpa.attend(*inputs, scale=scale, visibility=visibility)
    if not torch.is_grad_enabled():
        return _joined(*inputs, sink, value, scale, visibility, name)[0]
    if torch.compiler.is_compiling():  # Dynamo takes no tensor for two inputs
        inputs = q_BHTD, k_BGSD.view_as(k_BGSD), v_BGSV.view_as(v_BGSV)
    return _Attend.apply(*inputs, sink, value, scale, visibility, name)


def _after_tokens(
    q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor], visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor, Visibility]:
    """Queries, keys and values with the prefix as N tokens before them, whose queries are 0."""
    number = prefix[0].shape[2]
    key_mask = visibility.key_mask
    if key_mask is not None:
        key_mask = torch.nn.functional.pad(key_mask, (number, 0), value=True)
    q = torch.nn.functional.pad(q, (0, 0, number, 0))
    k, v = (torch.cat([own.to(x.dtype), x], 2) for own, x in zip(prefix, (k, v), strict=True))
    return q, k, v, visibility._replace(key_mask=key_mask)


def lone_kernel(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, kind: str, kernel: str | None = None
) -> tuple[Any, Tensor, Tensor, Visibility]:
    """A kernel for one query of a `kind` other than PLAIN, or None; its keys, values and mask."""
    queries = q.shape[2]
    if q.is_cuda and (first := visibility.earliest(queries, k.shape[2])):
        k, v, visibility = k[:, :, first:], v[:, :, first:], visibility.of_keys(first)
    visibility = visibility.settled(queries, k.shape[2])
    name = select_kernel(q, k, v, visibility, kernel, kind)
    return KERNELS[name].run if name else None, k, v, visibility


def attend_unrotated(
    q_BHTD: Tensor,
    t_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    rotation: Rotation,
    form: Form,
    attend: Any,
    visibility: Visibility,
    **options: Any,
) -> Tensor:
    """`attend` over `coca_keys(t, rotation.table(), form)`; a kernel may rotate t as it reads.

    Args:
        q_BHTD: as in `coca_queries`.
        t_BGSE: x W_T before the relu, [B, G, S, D/2], as CoCA's keys are cached.
        rotation: of the last S keys, or of more.
        attend: attention function, called where no kernel reads t.
        options: sink, scale and prefix, as in `attend`.

    Returns:
        [B, H, T, V].
    """
    prefix = options.pop("prefix", None)
    run, t, v, visibility = lone_kernel(q_BHTD, t_BGSE, v_BGSV, visibility, UNROTATED)
    options["visibility"] = visibility
    if run is None or prefix is not None:
        table = tuple(part[..., -t.shape[2] :, :] for part in rotation.table())
        k_BGSD = coca_keys(t, table, form)  # type: ignore[arg-type]
        return attend(q_BHTD, k_BGSD, v, prefix=prefix, **options)
    if form == "slack":  # q · R [t; t] as q′ · R [t; 0]
        first_half, second_half = q_BHTD.chunk(2, -1)
        q_BHTD = torch.cat([first_half + second_half, second_half - first_half], -1)
    with without_autocast(q_BHTD):
        o: Tensor = run.unrotated(q_BHTD, t, v, rotation=rotation, **options)
        return o


def at_zero_queries(sink: float | Tensor | None) -> float | Tensor | None:
    """The sink at q = 0, where a logit by query (a product with q) is 0."""
    return 0.0 if isinstance(sink, Tensor) and sink.ndim == 3 else sink


def _joined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    value: Tensor | None,
    scale: float,
    visibility: Visibility,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with the sink."""
    # Autocast would round the float32 scores that the tiles are careful to keep.
    with without_autocast(q):
        o, lse = KERNELS[kernel].run.forward(q, k, v, scale=scale, visibility=visibility)
    return (o, lse) if sink is None else sinks.join(o, lse, sink, value)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        o, lse = _joined(*call)
        q, k, v, sink, value, scale, visibility, kernel = call
        masks = visibility.key_mask, visibility.segments
        ctx.save_for_backward(q, k, v, o, lse, sink, value, *masks)
        ctx.causal, ctx.window, ctx.scale = visibility.causal, visibility.window, scale
        ctx.kernel = kernel
        # A tensor of its own: Dynamo of torch 2.11 loses the gradient of one that is also an
        # earlier result, as `sinks.join` writes in place.
        return o.view_as(o) if torch.compiler.is_compiling() else o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        q, k, v, o, lse, sink, value, *masks = ctx.saved_tensors
        visibility = Visibility(ctx.causal, ctx.window, *masks)
        dsink = dvalue = None
        with without_autocast(q):
            dq, dk, dv = KERNELS[ctx.kernel].run.backward(
                grad, Saved(q, k, v, o, lse), scale=ctx.scale, visibility=visibility
            )
            if sink is not None and any(ctx.needs_input_grad[3:5]):
                dsink, dvalue = sinks.gradients(sink, value, grad, o, lse)
        return dq, dk, dv, dsink, dvalue, None, None, None


def check(
    q: Tensor, k: Tensor, v: Tensor, sink: float | Tensor | None, visibility: Visibility
) -> None:
    """Raise a ClearheadError if shapes or dtypes do not fit `attend`."""
    causal, window, key_mask, segments = visibility
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ClearheadError(f"q, k and v must share one floating dtype; found {found}")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width or v.shape[:3] != k.shape[:3]:
        found = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ClearheadError(f"q [B,H,T,D], k [B,G,S,D], v [B,G,S,V] do not fit; found {found}")
    if heads % groups:
        raise ClearheadError(f"{heads} query heads cannot share {groups} key heads: give a divisor")
    if queries > keys and (causal or window is not None or segments is not None):
        raise ClearheadError(
            f"causal, windowed or packed attention needs at least {queries} keys, one a query; "
            f"found {keys}"
        )
    if window is not None and window < 1:
        raise ClearheadError(f"window is {window}: it holds at least 1 key, a query's own")
    rows = isinstance(sink, Tensor) and sink.ndim > 1  # a shape in a tuple of two fixes the batch
    if isinstance(sink, Tensor) and sink.shape != ((batch, heads, queries) if rows else (heads,)):
        raise ClearheadError(
            f"sink must have one logit a head [{heads}], or a query [{batch}, {heads}, {queries}]; "
            f"found {tuple(sink.shape)}"
        )
    if key_mask is not None and (key_mask.shape != (batch, keys) or key_mask.dtype != torch.bool):
        found = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise ClearheadError(f"key_mask must be bool [{batch}, {keys}]; found {found}")
    if segments is not None and segments.shape != (batch, keys):
        raise ClearheadError(f"segments must be [{batch}, {keys}]; found {tuple(segments.shape)}")


def _check_prefix(prefix: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    keys, values = prefix
    (batch, groups, _, width), number = k.shape, keys.shape[2] if keys.ndim == 4 else 0
    wanted = (batch, groups, number, width), (batch, groups, number, v.shape[3])
    if number < 1 or (keys.shape, values.shape) != wanted:
        raise ClearheadError(
            "a prefix is keys [B,G,N,D] and values [B,G,N,V], N of 1 or more, beside k "
            f"{tuple(k.shape)} and v {tuple(v.shape)}; found {tuple(keys.shape)} and "
            f"{tuple(values.shape)}"
        )
