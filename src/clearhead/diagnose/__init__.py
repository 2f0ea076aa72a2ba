"""Statistics of a trained model: where attention goes, and how its activations spread.

`clearhead.probe` feeds them while a model runs on windows of text.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.diagnose.attention_profile import RowMeans
    from clearhead.diagnose.diagnosis import Diagnosis, diagnose, with_extrapolation
    from clearhead.diagnose.hidden import HiddenStatistics, RotatedKurtosis, kurtosis
    from clearhead.diagnose.whole_maps import attention_maps

__all__ = [
    "Diagnosis",
    "HiddenStatistics",
    "RotatedKurtosis",
    "RowMeans",
    "attention_maps",
    "diagnose",
    "kurtosis",
    "with_extrapolation",
]

__getattr__ = lazily(__name__)
