"""Hugging Face models: configuration, model classes, presets, and what they cost.

Importing this registers `model_type` "clearhead" with transformers' AutoConfig and AutoModel.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from clearhead.models.catalogue import BASELINE, PRESETS, SIZES, preset, presets
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.modeling import ClearheadForCausalLM, ClearheadModel
from clearhead.models.plan import Plan, plan
from clearhead.models.scaling import SCALINGS, scaled, with_rope_scaling

AutoConfig.register("clearhead", ClearheadConfig)
AutoModel.register(ClearheadConfig, ClearheadModel)
AutoModelForCausalLM.register(ClearheadConfig, ClearheadForCausalLM)

__all__ = [
    "BASELINE",
    "PRESETS",
    "SCALINGS",
    "SIZES",
    "ClearheadConfig",
    "ClearheadForCausalLM",
    "ClearheadModel",
    "Plan",
    "plan",
    "preset",
    "presets",
    "scaled",
    "with_rope_scaling",
]
