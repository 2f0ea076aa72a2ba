"""Trained gains of values and projections W = α W_init + β ΔW (arXiv 2311.01906, figures 4, 22)."""

from statistics import fmean
from typing import Any

from clearhead.models.inspection import decoder_layers
from clearhead.nn.attention import Attention
from clearhead.nn.values import Reparametrised

OF_VALUES, OF_PROJECTIONS = "beta_over_alpha_values", "beta_over_alpha_projections"


def gain_ratios(model: Any) -> list[dict[str, Any]]:
    """Payloads of "measure" records, from the weights alone; none without such matrices.

    - `beta_over_alpha_values`, `beta_over_alpha_projections`: |β/α| by layer.
    - `beta_over_alpha`: mean over all of them but the first layer's values, which the paper finds
      to be the exception.
    """
    lines: list[dict[str, Any]] = [
        {"metric": metric, "layer": n, "value": (one.beta.double() / one.alpha).abs().item()}
        for n, layer in enumerate(decoder_layers(model))
        for module in layer.modules()
        if isinstance(module, Attention)
        for metric, one in ((OF_VALUES, module.v_proj), (OF_PROJECTIONS, module.o_proj))
        if isinstance(one, Reparametrised)
    ]
    others = [one["value"] for one in lines if (one["metric"], one["layer"]) != (OF_VALUES, 0)]
    whole = [{"metric": "beta_over_alpha", "value": fmean(others)}] if others else []
    return whole + lines
