"""A clearhead model: the code is the package `clearhead` (pip install clearhead).

With it installed, `import clearhead.models` and transformers' AutoModel classes are enough, or this
file with trust_remote_code=True.
"""

from clearhead.models import (
    ClearheadConfig,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
)

__all__ = [
    "ClearheadConfig",
    "ClearheadForCausalLM",
    "ClearheadForMaskedLM",
    "ClearheadForSequenceClassification",
]
