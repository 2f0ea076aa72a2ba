"""Test of a kernel on its device before first use, once a process and kind of request.

Other libraries' kernels differ by device, version and width. A GPU's kernel is used if the output
and gradients of a tiny request, with a sink, agree with float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from clearhead.errors import first_line
from clearhead.ops import oracles, sinks
from clearhead.ops.coca import coca_keys
from clearhead.ops.requests import DIFFERENTIAL, PLAIN, Call, Request
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility

# ‖error‖ / ‖exact‖; float32 products may run as TF32.
BOUND = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Two blocks of keys and a part of one, and, where queries are fewer, a part of a block of them.
_KEYS, _QUERIES, _WINDOW = 150, 37, 21


def failure(kernel: Any, request: Request) -> str | None:
    """The kernel's error with such requests on this device; None if it passes."""
    device = torch.device(request.device)
    if request.ordinal is not None:
        device = torch.device(request.device, request.ordinal)
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            return _attention(kernel, request, device)
        except Exception as error:  # Triton's have no common class
            return f"it failed: {first_line(error) or type(error).__name__}"


def _attention(kernel: Any, request: Request, device: torch.device) -> str | None:
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).to(request.dtype)

    queries = 1 if request.lone else _KEYS if request.square else _QUERIES
    q = random(2, 2 * request.shared, queries, request.depth)
    # Keys that no query sees have been left out.
    keys = min(_KEYS, queries + _WINDOW - 1) if request.window else _KEYS
    k, v = random(2, 2, keys, request.depth), random(2, 2, keys, request.width)
    grad = random(*q.shape[:3], request.width)
    # Padding on the left of a row and the right of another; documents of two lengths.
    key = torch.arange(keys, device=device).expand(2, -1)
    first = torch.tensor([[keys // 5], [0]], device=device)
    end = torch.tensor([[keys], [keys - 11 if request.square else keys]], device=device)
    visibility = Visibility(
        causal=request.causal,
        window=_WINDOW if request.window else None,
        key_mask=(key >= first) & (key < end) if request.key_mask else None,
        segments=(key > keys * 3 // 5).int() if request.segments else None,
    )
    call = Call(q, k, v, request.depth**-0.5, visibility)
    sink = torch.tensor([0.5] * q.shape[1], device=device)
    if request.kind != PLAIN:
        with torch.no_grad():
            return _compared(*_of_lone_query(kernel, request, call, sink), request)
    shown = torch.ones((), device=device)
    if visibility.key_mask is not None:  # what a hidden token itself gets is unspecified
        shown = visibility.key_mask[:, None, -q.shape[2] :, None]
        grad = grad * shown
    whole = hasattr(kernel, "attend")
    with torch.set_grad_enabled(whole):
        if whole:
            inputs = [x.requires_grad_() for x in (q, k, v)]
            o = kernel.attend(call)
            results = [o, *torch.autograd.grad(o, inputs, grad)]
        else:
            o, lse = kernel.forward(call)
            o, lse = sinks.join(o, lse, sink)
            results = [o, *kernel.backward(call, grad, o, lse)]
    options = {"scale": call.scale, "sink": None if whole else sink, **visibility._asdict()}
    with torch.enable_grad():
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want = oracles.attend(*exact, **options)
    results[0] = results[0].detach() * shown
    gradients = torch.autograd.grad(want, exact, grad.double())
    return _compared(results, [want.detach() * shown, *gradients], request)


def _of_lone_query(
    kernel: Any, request: Request, call: Call, sink: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, the kernel's and the exact one, of DIFFERENTIAL and UNROTATED requests."""
    q, k, v = (x.double() for x in call[:3])
    options = {"scale": call.scale, "sink": sink, **call.visibility._asdict()}
    if request.kind == DIFFERENTIAL:
        lam, value = torch.tensor(0.4, device=q.device), torch.cat([v[:, 0::2], v[:, 1::2]], -1)
        first, second = (
            oracles.attend(q[:, m::2], k[:, m::2], value, **{**options, "sink": sink[m::2]})
            for m in (0, 1)
        )
        return [kernel.difference(call, lam, sink)], [first - lam.double() * second]
    t = call.k[..., : request.depth // 2].contiguous()
    frequency = 1e4 ** -(torch.arange(0, request.depth, 2, device=q.device) / request.depth)
    positions = torch.arange(90, 90 + k.shape[2], device=q.device)
    rotation = Rotation(positions[None], frequency)
    o = kernel.unrotated(call._replace(k=t), sink, rotation)
    k_tilde = coca_keys(t.double(), rotation.table(), "exact")
    return [o], [oracles.attend(q, k_tilde, v, **options)]


def _compared(results: list[Tensor], exact: list[Tensor], request: Request) -> str | None:
    for name, a, b in zip(("o", "dq", "dk", "dv"), results, exact, strict=False):
        error = float((a.detach().double() - b.detach()).norm() / b.norm().clamp_min(1e-30))
        if not error < BOUND[request.dtype]:
            return f"{name} is off by {error:.1e} of its size in a test on this device"
    return None
