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
from clearhead.models.base_model import ClearheadModel
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.classification import ClearheadForSequenceClassification
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.masked import ClearheadForMaskedLM

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
    from clearhead.models.scaling import SCALINGS, with_rope_scaling, with_scaled_rope

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
    "with_rope_scaling",
    "with_scaled_rope",
]

__getattr__ = lazily(__name__)
