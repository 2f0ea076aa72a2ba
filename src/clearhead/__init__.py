"""Published repairs of Transformer attention as Hugging Face models: build, train, compare.

    import clearhead
    model = clearhead.ClearheadForCausalLM(clearhead.preset("differential"))

Names are imported when they are first used, so that `import clearhead` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from clearhead.lazy import lazily
from clearhead.versions import __version__ as __version__

if TYPE_CHECKING:
    from clearhead.diagnose.attention_check import check_attention as check_attention
    from clearhead.errors import ClearheadError as ClearheadError
    from clearhead.models import ClearheadConfig as ClearheadConfig
    from clearhead.models import ClearheadForCausalLM as ClearheadForCausalLM
    from clearhead.models import ClearheadForMaskedLM as ClearheadForMaskedLM
    from clearhead.models import (
        ClearheadForSequenceClassification as ClearheadForSequenceClassification,
    )
    from clearhead.models import anneal as anneal
    from clearhead.models import preset as preset
    from clearhead.models import presets as presets
    from clearhead.models import register_preset as register_preset
    from clearhead.nn.registry import register as register

_ROOMS = ("data", "diagnose", "eval", "models", "nn", "ops", "optim", "report", "spec", "train")


_find, __all__ = lazily(__name__)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"clearhead.{name}") if name in _ROOMS else _find(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
