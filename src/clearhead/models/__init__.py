"""Hugging Face models: configuration, model classes, presets and costs.

Importing this registers `model_type` "clearhead" with transformers' AutoConfig and AutoModel.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from clearhead.models.base_model import ClearheadModel as ClearheadModel
from clearhead.models.configuration import ClearheadConfig as ClearheadConfig
from clearhead.models.language_models import ClearheadForCausalLM as ClearheadForCausalLM
from clearhead.models.language_models import ClearheadForMaskedLM as ClearheadForMaskedLM
from clearhead.models.language_models import (
    ClearheadForSequenceClassification as ClearheadForSequenceClassification,
)
from clearhead.models.planning import Plan as Plan
from clearhead.models.planning import plan as plan
from clearhead.models.planning import preset as preset
from clearhead.models.starts import SCALINGS as SCALINGS
from clearhead.models.starts import with_rope_scaling as with_rope_scaling
from clearhead.named_models import BASELINE as BASELINE
from clearhead.named_models import PRESETS as PRESETS
from clearhead.named_models import SIZES as SIZES
from clearhead.named_models import presets as presets
from clearhead.named_models import register_preset as register_preset
from clearhead.nn.annealing import anneal as anneal

transformers.AutoConfig.register("clearhead", ClearheadConfig)
transformers.AutoModel.register(ClearheadConfig, ClearheadModel)
transformers.AutoModelForCausalLM.register(ClearheadConfig, ClearheadForCausalLM)
transformers.AutoModelForMaskedLM.register(ClearheadConfig, ClearheadForMaskedLM)
transformers.AutoModelForSequenceClassification.register(
    ClearheadConfig, ClearheadForSequenceClassification
)
# By this table Trainer's label smoothing knows the models whose labels are to be shifted.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["clearhead"] = ClearheadForCausalLM.__name__
