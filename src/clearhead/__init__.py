"""Four repairs of the Transformer, to build, train, measure and compare.

    import clearhead
    model = clearhead.ClearheadForCausalLM(clearhead.preset("differential"))

Names are imported when they are first used, so that `import clearhead` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from clearhead.versions import __version__

if TYPE_CHECKING:
    from clearhead.errors import ClearheadError
    from clearhead.models import (
        ClearheadConfig,
        ClearheadForCausalLM,
        ClearheadForMaskedLM,
        ClearheadForSequenceClassification,
        preset,
        presets,
        register_preset,
    )
    from clearhead.nn.registry import register

_HOME = {
    "ClearheadError": "clearhead.errors",
    "ClearheadConfig": "clearhead.models",
    "ClearheadForCausalLM": "clearhead.models",
    "ClearheadForMaskedLM": "clearhead.models",
    "ClearheadForSequenceClassification": "clearhead.models",
    "preset": "clearhead.models",
    "presets": "clearhead.models",
    "register": "clearhead.nn.registry",
    "register_preset": "clearhead.models",
}
_ROOMS = ("data", "diagnose", "eval", "models", "nn", "ops", "optim", "report", "spec", "train")

__all__ = [
    "ClearheadConfig",
    "ClearheadError",
    "ClearheadForCausalLM",
    "ClearheadForMaskedLM",
    "ClearheadForSequenceClassification",
    "__version__",
    "preset",
    "presets",
    "register",
    "register_preset",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"clearhead.{name}")
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
