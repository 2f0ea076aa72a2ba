"""Checkpoints that a user names."""

from pathlib import Path
from typing import Any

from clearhead.models.loading import best_device, load


def load_model(
    name: str, kinds: tuple[str, ...] = ("causal",), *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the best device, and its tokenizer.

    Raises:
        ClearheadError: as `clearhead.models.loading.load`.
    """
    model, tokenizer = load(name, kinds, trust_remote_code=trust_remote_code)
    return model.to(best_device()), tokenizer


def is_preset(name: str) -> bool:
    """True for a preset's name, False for a folder with a configuration."""
    return not Path(name).is_dir()
