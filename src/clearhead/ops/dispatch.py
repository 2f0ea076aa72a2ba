"""The dispatch table of attention: request × device × dtype → kernel.

The first kernel that serves a request and passes its test on the device (`clearhead.ops.self_test`)
is taken. `ops.attend(kernel=…)` or CLEARHEAD_ATTENTION_KERNEL give another list.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from operator import index
from typing import Any, NamedTuple

import torch

from clearhead.errors import ClearheadError, choose
from clearhead.ops import (
    cpu_flash,
    cuda_cudnn,
    cuda_flash,
    cuda_sdpa,
    lone,
    self_test,
    split_decode,
    tiles,
)
from clearhead.ops.packed import Operator
from clearhead.ops.precision import is_exporting
from clearhead.ops.requests import DIFFERENTIAL, KINDS, PLAIN, SHORT, UNROTATED, Call, Request

VARIABLE = "CLEARHEAD_ATTENTION_KERNEL"
_log = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """An entry of the table: its device (None: any), its requests in words, and its functions.

    `run` has `refuses`, the reason against a request or None; `forward` and `backward` (see `Call`)
    or `attend`; `difference` for DIFFERENTIAL, `unrotated` for UNROTATED, `prefixed` for PREFIXED.
    """

    device: str | None
    serves: str
    run: Any
    kinds: tuple[str, ...] = (PLAIN,)


KERNELS: Mapping[str, Kernel] = {
    "cpu-flash": Kernel("cpu", "T = S, padding; V ≤ D", cpu_flash),
    "sdpa": Kernel(
        "cuda",
        "softmax by PyTorch's own call: T = S; T = 1, padding; both without sinks",
        cuda_sdpa,
    ),
    "cudnn": Kernel("cuda", "training on Hopper; T = S; D and V ≤ 256", cuda_cudnn),
    "flash": Kernel("cuda", "T ≤ S, windows; D and V ≤ 256", cuda_flash),
    # For a lone query before packing, which would move its cache: these read that as it lies.
    "split-decode": Kernel(
        "cuda",
        "T = 1, padding; V1 and CoCA at once; D and V 32, 64 or 128",
        split_decode,
        (PLAIN, DIFFERENTIAL, UNROTATED),
    ),
    "products": Kernel(None, "T = 1, padding; V1; CoCA and a prefix on a CPU", lone, KINDS),
    "flash-packed": Kernel("cuda", "as flash, with documents and padding", Operator("flash")),
    "efficient": Kernel(
        "cuda",
        "float32, any widths; T = S, causal windows, documents, padding",
        Operator("efficient"),
    ),
    "tiles": Kernel(None, "everything", tiles),
}


class Choice(NamedTuple):
    """The kernel taken, and the reason against each one before it."""

    name: str
    refusals: Mapping[str, str]


def select_kernel(
    call: Call, kernel: str | None = None, kind: str = PLAIN, sink: bool = False
) -> str:
    """Name of the `KERNELS` entry that computes this; "" where none computes a kind but PLAIN.

    `kernel` has names to be tried in order, by default CLEARHEAD_ATTENTION_KERNEL's, or all.
    """
    if is_exporting():  # what serves any length, on any device
        if kind == PLAIN:
            return "tiles"
        lone_query = call.visibility.window is None and call.visibility.segments is None
        return "products" if kind == DIFFERENTIAL and lone_query else ""
    return _resolved(kernel, *arguments_of(call, kind, sink))


def arguments_of(call: Call, kind: str = PLAIN, sink: bool = False) -> tuple[object, ...]:
    """Arguments of `request`, all constants under torch.compile."""
    q, k, v, _, visibility = call
    (_, heads, queries, depth), (_, groups, keys, _) = q.shape, k.shape
    # Conditions, not comparisons: a compiler takes their outcomes for constants.
    lone = True if queries == 1 else False  # noqa: SIM210
    square = not lone and (True if queries == keys else False)  # noqa: SIM210
    short = torch.compiler.is_compiling() and (True if keys <= SHORT else False)  # noqa: SIM210
    learns = q.requires_grad or k.requires_grad or v.requires_grad
    return (
        *(q.device.type, q.device.index, q.dtype),
        *(index(depth), index(v.shape[3]), index(heads // groups)),
        *(lone, square, short),
        *(visibility.causal, visibility.window is not None),
        *(visibility.key_mask is not None, visibility.segments is not None),
        *(torch.is_grad_enabled() and learns, sink, kind),
    )


def request(device: str, ordinal: int | None, *rest: object) -> Request:
    """The request, with its device's capability."""
    capability = torch.cuda.get_device_capability(ordinal) if device == "cuda" else None
    return Request(device, ordinal, capability, *rest)  # type: ignore[arg-type]


@torch.compiler.assume_constant_result
def _resolved(names: str | None, *arguments: object) -> str:
    return _chosen(names or os.environ.get(VARIABLE) or "", *arguments)


@cache
def _chosen(names: str, *arguments: Any) -> str:
    wanted = request(*arguments)
    choice = resolve(wanted, names, self_test.failure)
    refusals = "; ".join(f"not {name}: {reason}" for name, reason in choice.refusals.items())
    name = choice.name or "in two steps"
    _log.info("attention on %s: %s%s", wanted, name, f" ({refusals})" if refusals else "")
    return choice.name


def resolve(
    wanted: Request, names: str = "", failure: Callable[[Any, Request], str | None] | None = None
) -> Choice:
    """The first kernel that serves the request, of `names` if given; `failure` tests it on a GPU.

    For a kind other than PLAIN, names after the first that does not compute it are ignored.
    """
    order = [choose("attention kernel", one.strip(), KERNELS) for one in names.split(",") if one]
    refusals: dict[str, str] = {}
    for name in order or KERNELS:
        kernel = KERNELS[name]
        if wanted.kind not in kernel.kinds:
            if order:
                break
            continue
        if kernel.device not in (None, wanted.device):
            if order:
                refusals[name] = f"it runs on {kernel.device}"
            continue
        reason = kernel.run.refuses(wanted)
        if reason is None and kernel.device == "cuda" and failure is not None:
            reason = failure(kernel.run, wanted)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    if wanted.kind != PLAIN:
        return Choice("", refusals)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise ClearheadError(f"none of the kernels named serves {wanted} ({reasons}): name tiles too")
