"""What a trained model does inside: where attention goes, and how its activations spread.

Probes ride on transformers' AttentionInterface and on forward hooks, so they enter any causal
language model without changing its outputs, and hold at most a tile of attention weights.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.diagnose.attention import (
        AttentionStatistics,
        attention_maps,
        attention_statistics,
    )
    from clearhead.diagnose.diagnosis import Diagnosis, diagnose, with_extrapolation
    from clearhead.diagnose.hidden import HiddenStatistics, hidden_statistics, kurtosis
    from clearhead.diagnose.measurement import measure
    from clearhead.diagnose.rotated import rotated_kurtosis

__all__ = [
    "AttentionStatistics",
    "Diagnosis",
    "HiddenStatistics",
    "attention_maps",
    "attention_statistics",
    "diagnose",
    "hidden_statistics",
    "kurtosis",
    "measure",
    "rotated_kurtosis",
    "with_extrapolation",
]

__getattr__ = lazily(__name__)
