"""The dispatch table of attention as docs/performance.md has it: kernels, and typical requests."""

from collections.abc import Mapping
from typing import Any

import torch

from clearhead.ops.dispatch import KERNELS, resolve
from clearhead.ops.requests import DIFFERENTIAL, PREFIXED, UNROTATED, Request

PLAIN = Request(
    device="cpu",
    ordinal=None,
    capability=None,
    dtype=torch.float32,
    depth=64,
    width=64,
    shared=1,
    lone=False,
    square=True,
    short=False,
    causal=True,
    window=False,
    key_mask=False,
    segments=False,
    learning=True,
)
HALF: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
DEVICES: Mapping[str, dict[str, Any]] = {
    "CPU": {},
    "Hopper bf16": HALF | {"capability": (9, 0)},
    "Ampere bf16": HALF | {"capability": (8, 0)},
    "CUDA float32": {"device": "cuda", "capability": (9, 0)},
}
LAST: dict[str, Any] = {"square": False, "learning": False}
LONE: dict[str, Any] = LAST | {"lone": True, "causal": False}
REQUESTS: Mapping[str, dict[str, Any]] = {
    "training, whole texts": {},
    "the same with a sink": {"sink": True},
    "the same with a sink, V = 2 D": {"sink": True, "width": 128},
    "evaluation, whole texts": {"learning": False},
    "documents": {"segments": True},
    "padded rows": {"key_mask": True},
    "a window": {"window": True},
    "1 < T < S": LAST,
    "decoding, T = 1": LONE,
    "decoding, a sink": LONE | {"sink": True},
    "decoding, padded cache": LONE | {"key_mask": True},
    "decoding, a sink, padded cache": LONE | {"key_mask": True, "sink": True},
    "decoding, V1": LONE | {"kind": DIFFERENTIAL},
    "decoding, CoCA": LONE | {"kind": UNROTATED},
    "decoding, a prefix": LONE | {"kind": PREFIXED},
    "more than 256 wide": {"depth": 320, "width": 320},
}


def markdown() -> str:
    """The kernels, and what typical requests go to."""
    lines = ["| kernel | runs on | serves |", "| --- | --- | --- |"]
    for name, kernel in KERNELS.items():
        lines.append(f"| `{name}` | {kernel.device or 'everything'} | {kernel.serves} |")
    devices = " | ".join(DEVICES)
    lines += ["", f"| request | {devices} |", "| --- |" + " --- |" * len(DEVICES)]
    for title, changes in REQUESTS.items():
        choices = [resolve(PLAIN._replace(**of, **changes)) for of in DEVICES.values()]
        cells = " | ".join(f"`{choice.name}`" if choice.name else "none" for choice in choices)
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines)
