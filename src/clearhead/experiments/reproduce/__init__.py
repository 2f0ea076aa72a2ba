"""The papers' experiments: one file each, the intervention marked; yielding command lines."""

from collections.abc import Mapping

from clearhead.experiments.reproduce import blocks, encoders, long_context, outliers
from clearhead.experiments.reproduce.study import Study

# Name → scale → studies.
EXPERIMENTS: Mapping[str, Mapping[str, tuple[Study, ...]]] = {
    "blocks": blocks.SCALES,
    "long-context": long_context.SCALES,
    "encoders": encoders.SCALES,
    "outliers": outliers.SCALES,
}
