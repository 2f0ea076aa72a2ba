"""Published repairs of Transformer attention as Hugging Face models: build, train, compare.

    import clearhead
    model = clearhead.ClearheadForCausalLM(clearhead.preset("differential"))

Names are imported when they are first used, so that `import clearhead` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from clearhead.errors import ClearheadError
from clearhead.versions import __version__ as __version__

if TYPE_CHECKING:
    from clearhead.diagnose.attention_check import check_attention
    from clearhead.models import (
        ClearheadConfig,
        ClearheadForCausalLM,
        ClearheadForMaskedLM,
        ClearheadForSequenceClassification,
        anneal,
        preset,
        presets,
        register_preset,
    )
    from clearhead.nn.registry import register

__all__ = [
    "ClearheadConfig",
    "ClearheadError",
    "ClearheadForCausalLM",
    "ClearheadForMaskedLM",
    "ClearheadForSequenceClassification",
    "anneal",
    "check_attention",
    "preset",
    "presets",
    "register",
    "register_preset",
]
_ROOMS = ("data", "diagnose", "eval", "models", "nn", "ops", "optim", "report", "spec", "train")
_ELSEWHERE = {"check_attention": "diagnose.attention_check", "register": "nn.registry"}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"clearhead.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"clearhead.{_ELSEWHERE.get(name, 'models')}"), name)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
