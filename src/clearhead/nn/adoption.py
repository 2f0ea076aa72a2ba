"""Weights of a trained attention layer that go on under another mechanism (`Declaration.adopt`)."""

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.spec import LayerSpec

Weights = dict[str, Tensor]


def with_doubled_output(weights: Weights, layer: LayerSpec) -> Weights:
    """The same weights with 2 W_O, for a mechanism that starts by halving the heads.

    Raises:
        ClearheadError: a layer without W_O.
    """
    if "o_proj.weight" not in weights or layer.projections != "linear":
        raise ClearheadError(
            f"maps={layer.maps!r}, epilogue={layer.epilogue!r} halve the heads at their start, and "
            f"projections={layer.projections!r} has no W_O to double: convert a model with "
            "projections='linear'"
        )
    return {**weights, "o_proj.weight": 2 * weights["o_proj.weight"]}
