"""Attention maps and tables of numbers, compressed for a browser.

A weight w is one of few levels on a √ scale, so that small weights keep their shape:
w ≈ peak · sign(n) · (n / steps)², n the level less `centre`. The bytes of a map are its columns
one below the other (a key's weights change slowly from query to query), then a null key's weights;
under causal attention without the zeros above the diagonal.
"""

import base64
import math
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
    peak = max(float(weights_TT.abs().max()), 0.0 if null_T is None else float(null_T.max()))
    peak = float(f"{peak:.6g}") or 1.0
    columns_TT = _levels(weights_TT.T, peak, steps)
    if causal:
        columns_TT = columns_TT[np.triu_indices(len(columns_TT))]
    parts = [columns_TT.ravel()]
    if null_T is not None:
        parts.append(_levels(null_T, peak, steps))
    data = pack((np.concatenate(parts) + centre).astype(np.uint8))
    return {"peak": peak, "steps": steps, "centre": centre, "data": data}


def pack_logarithms(values: Tensor) -> dict[str, Any]:
    """Positive numbers as 65,535 even steps of their logarithm, {"low", "high", "data"}; what is
    not positive and finite is 0."""
    usable = values.isfinite() & (values > 0)
    logs = torch.where(usable, values, 1.0).double().log2()
    low = float(logs[usable].min()) if bool(usable.any()) else 0.0
    high = float(logs[usable].max()) if bool(usable.any()) else 0.0
    low, high = math.floor(low * 64) / 64, math.ceil(high * 64) / 64
    steps = (logs - low) / max(high - low, 1e-9) * 65534 + 1
    return {
        "low": low,
        "high": high,
        "data": pack(torch.where(usable, steps.round(), 0.0).cpu().numpy().astype(np.uint16)),
    }


def _levels(values: Tensor, peak: float, steps: int) -> np.ndarray:
    roots = (values.abs() / peak).clamp(max=1.0).sqrt() * values.sign()
    return (roots * steps).round().to(torch.int16).cpu().numpy()
