"""Four repairs of the Transformer, to build, train, measure and compare.

    import clearhead
    model = clearhead.ClearheadForCausalLM(clearhead.preset("differential"))

Names are imported when they are first used, so that `import clearhead` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead.errors import ClearheadError as ClearheadError
    from clearhead.models import ClearheadConfig as ClearheadConfig
    from clearhead.models import ClearheadForCausalLM as ClearheadForCausalLM
    from clearhead.models import preset as preset
    from clearhead.models import presets as presets

_HOME = {
    "ClearheadError": "clearhead.errors",
    "ClearheadConfig": "clearhead.models",
    "ClearheadForCausalLM": "clearhead.models",
    "preset": "clearhead.models",
    "presets": "clearhead.models",
}
_ROOMS = ("data", "diagnose", "eval", "models", "nn", "ops", "optim", "report", "spec", "train")

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 (the names are strings)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"clearhead.{name}")
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_ROOMS, "__version__"])
