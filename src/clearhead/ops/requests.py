"""Attention requests, as the dispatch table sees them, and tensors saved for gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# Kinds of request: the dot product; V1's two maps at once; CoCA's keys before their rotation; a
# prefix beside the keys.
KINDS = PLAIN, DIFFERENTIAL, UNROTATED, PREFIXED = "plain", "differential", "unrotated", "prefixed"
# Compiled tiles beat PyTorch's CPU flash kernel up to here (docs/log.md); beyond, unrolled
# tiles also take long to compile.
SHORT = 1024


class Saved(NamedTuple):
    """Tensors saved for the backward pass: inputs, output and log-sum-exp.

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, V], o [B, H, T, V], lse [B, H, T].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor


class Request(NamedTuple):
    """Properties of a call by which a kernel is chosen: constants, so that a choice is made once.

    Attributes:
        device: its type. capability: of a CUDA device, (9, 0) for Hopper; None elsewhere.
        ordinal: index of the device, for a kernel's self-test.
        depth: D, the width of queries and keys. width: V, of values. shared: H / G.
        lone: T = 1. square: T = S > 1. short: compiled, and S ≤ SHORT.
        learning: gradients are wanted.
        sink: a sink or a prefix joins the log-sum-exp.
        kind: PLAIN, DIFFERENTIAL, UNROTATED or PREFIXED.
    """

    device: str
    ordinal: int | None
    capability: tuple[int, int] | None
    dtype: torch.dtype
    depth: int
    width: int
    shared: int
    lone: bool
    square: bool
    short: bool
    causal: bool
    window: bool
    key_mask: bool
    segments: bool
    learning: bool
    sink: bool = False
    kind: str = PLAIN

    def __str__(self) -> str:
        """The properties that hold, such as "device cuda, depth 64, causal"."""
        held = [(name, value) for name, value in self._asdict().items() if value]
        return ", ".join(name if value is True else f"{name} {value}" for name, value in held)
