"""Hugging Face models: configuration, model classes, presets, and what they cost.

Importing this registers `model_type` "clearhead" with transformers' AutoConfig and AutoModel.
"""

from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from clearhead.lazy import lazily
from clearhead.models import sink_attention  # noqa: F401 (registers an attn_implementation)
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.classification import ClearheadForSequenceClassification
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.masked import ClearheadForMaskedLM
from clearhead.models.trunk import ClearheadModel

if TYPE_CHECKING:
    from clearhead.models.catalogue import (
        BASELINE,
        PRESETS,
        SIZES,
        preset,
        presets,
        register_preset,
    )
    from clearhead.models.planning import Plan, plan
    from clearhead.models.scaling import SCALINGS, scaled, with_rope_scaling

AutoConfig.register("clearhead", ClearheadConfig)
AutoModel.register(ClearheadConfig, ClearheadModel)
AutoModelForCausalLM.register(ClearheadConfig, ClearheadForCausalLM)
AutoModelForMaskedLM.register(ClearheadConfig, ClearheadForMaskedLM)
AutoModelForSequenceClassification.register(ClearheadConfig, ClearheadForSequenceClassification)

__all__ = [
    "BASELINE",
    "PRESETS",
    "SCALINGS",
    "SIZES",
    "ClearheadConfig",
    "ClearheadForCausalLM",
    "ClearheadForMaskedLM",
    "ClearheadForSequenceClassification",
    "ClearheadModel",
    "Plan",
    "plan",
    "preset",
    "presets",
    "register_preset",
    "scaled",
    "with_rope_scaling",
]

__getattr__ = lazily(__name__)
