"""Limits of a model's positions, and rotary frequencies that follow the length of the text."""

from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.models import ClearheadConfig
from clearhead.models.inspection import longest_text

BY_LENGTH = ("dynamic", "longrope")


def follow_length(model: Any) -> bool:
    """True if a longer text is read with other frequencies from its first token on."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type")]
    kinds += [part.get("rope_type") for part in rope.values() if isinstance(part, dict)]
    return any(kind in BY_LENGTH for kind in kinds)


def reset_dynamic_rope(model: Any) -> None:
    """Make transformers drop the frequencies of the longest text so far, which it keeps.

    Only a text shorter than the trained length resets them, so the model is given one.
    """
    if follow_length(model) and not isinstance(model.config, ClearheadConfig):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)


def check_length(model: Any, length: int) -> None:
    """Refuse texts of `length` tokens, answer included, where there is no such position.

    Raises:
        ClearheadError: naming the limit.
    """
    limit = longest_text(model)
    if limit is not None and length > limit:
        raise ClearheadError(
            f"{length:,} tokens are more than the {limit:,} learned positions of this model, "
            f"and no rope scaling applies to those: ask for at most {limit:,}, or evaluate a "
            "model with rope, alibi, forget or xpos"
        )
    if not isinstance(model.config, ClearheadConfig):
        return
    limit = model.base_model.position.longest()
    if limit is not None and length > limit:
        raise ClearheadError(
            f"{length:,} tokens, those to be written included, are more than the {limit:,} "
            f"positions that {model.config.position} can tell apart: ask for at most {limit:,}, "
            "or evaluate a model with rope"
        )
