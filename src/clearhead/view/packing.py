"""Attention maps and tables of numbers, compressed for a browser.

A weight w is one of few levels on a √ scale, so that small weights keep their shape:
w ≈ peak · sign(n) · (n / steps)², n the level less `centre`. The bytes of a map are its columns
one below the other (a key's weights change slowly from query to query), then a null key's weights;
under causal attention without the zeros above the diagonal.
"""

import base64
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

STEPS = 23  # 24 levels of weights that are never negative
SIGNED_STEPS = 15  # 31 levels


def pack(values: np.ndarray) -> str:
    """Little-endian bytes, compressed by zlib, in base64."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def pack_map(weights_TT: Tensor, null_T: Tensor | None, *, causal: bool) -> dict[str, Any]:
    """One map's {"peak", "steps", "centre", "data"}.

    Args:
        weights_TT: float32, finite; no weight above the diagonal if `causal`.
        null_T: the weights of a null key, where there is one.
        causal: leaves out what is above the diagonal.
    """
    signed = bool((weights_TT < 0).any())
    steps, centre = (SIGNED_STEPS, SIGNED_STEPS) if signed else (STEPS, 0)
    columns = weights_TT.T
    part = columns[tuple(torch.triu_indices(*columns.shape))] if causal else columns.flatten()
    weights = torch.cat([part, *([] if null_T is None else [null_T])])
    peak = float(f"{float(weights.abs().max()):.6g}") or 1.0
    levels = (weights.abs() / peak).clamp(max=1.0).sqrt() * weights.sign() * steps
    data = pack((levels.round() + centre).cpu().numpy().astype(np.uint8))
    return {"peak": peak, "steps": steps, "centre": centre, "data": data}
