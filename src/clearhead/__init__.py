"""Four repairs of the Transformer, to build, train, measure and compare.

    import clearhead
    model = clearhead.ClearheadForCausalLM(clearhead.preset("differential"))

Names are imported when they are first used, so that `import clearhead` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from clearhead.lazy import lazily
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


_find = lazily(__name__)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"clearhead.{name}") if name in _ROOMS else _find(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
