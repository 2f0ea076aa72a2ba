"""Loading a checkpoint that the user names."""

from pathlib import Path
from typing import Any

import clearhead.models  # registers our model type with transformers  # noqa: F401
from clearhead.errors import ClearheadError
from clearhead.experiments.building import best_device


def load_model(name: str) -> tuple[Any, Any]:
    """A causal language model in eval mode on the best device, and its tokenizer.

    Only safetensors are read, and no code that a checkpoint brings is run.

    Raises:
        ClearheadError: where there is no such model, or its files are damaged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = resolved(name)
    try:
        if getattr(AutoConfig.from_pretrained(name), "is_encoder_decoder", False):
            raise ClearheadError(f"{name} is an encoder-decoder: give a decoder-only model")
        model = AutoModelForCausalLM.from_pretrained(name, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ClearheadError:
        raise
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ClearheadError(
            f"cannot load a model from {name!r} ({reason}): give a folder with config.json, "
            "model.safetensors and a tokenizer, such as RUN/final, or a hub name"
        ) from error
    return model.to(best_device()).eval(), tokenizer


def resolved(name: str) -> str:
    """A run folder's finished model is meant by the folder; any other name stays."""
    return str(Path(name, "final")) if Path(name, "final").is_dir() else name
