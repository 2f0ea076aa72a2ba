"""A checkpoint of any kind as a classifier with its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import clearhead.models  # registers our model type with transformers  # noqa: F401
from clearhead.errors import ClearheadError
from clearhead.models import ClearheadConfig, loading
from clearhead.models.loading import (
    explained,
    load_config,
    pretrained,
    resolved,
    without_bars,
)
from clearhead.records.manifest import verify_model

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)


def load_tokenizer(name: str, *, trust_remote_code: bool) -> Any:
    """The checkpoint's tokenizer; its end token pads where it has none for that.

    Raises:
        ClearheadError: where there is none, or it needs code of its own without
            `trust_remote_code`.
    """
    with explained(name, "tokenizer"):
        tokenizer = loading.load_tokenizer(resolved(name), trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_classifier(
    name: str,
    classes: Sequence[str],
    *,
    tokenizer: Any,
    dropout: float | None,
    trust_remote_code: bool,
) -> Any:
    """A model that classifies, its head new unless the checkpoint has one of that size.

    The checkpoint is a causal model's, a masked one's, a classifier's, or any encoder's that
    transformers knows. A new head is drawn from PyTorch's generator.

    Args:
        classes: their names, which the model keeps as id2label; none for a regression.
        dropout: of a clearhead model; None is 0.1. Other models have settings of their own.
        trust_remote_code: whether Python code that the checkpoint brings may run.

    Returns:
        The model, on the CPU.

    Raises:
        ClearheadError: where there is no such model, weights of its trunk are missing, or `dropout`
            is for one that is not ours.
    """
    from transformers import AutoModelForSequenceClassification

    path = resolved(name)
    verify_model(Path(path))
    with without_bars(), explained(name, "classifier"):
        config = load_config(path, trust_remote_code=trust_remote_code)
        _prepare(config, classes, tokenizer.pad_token_id, dropout)
        return pretrained(
            AutoModelForSequenceClassification,
            path,
            head="new",
            trust_remote_code=trust_remote_code,
            config=config,
            dtype=torch.float32,
        )


def _prepare(config: Any, classes: Sequence[str], pad: int | None, dropout: float | None) -> None:
    names = dict(enumerate(classes)) or {0: "score"}
    config.id2label = names
    config.label2id = {name: number for number, name in names.items()}
    config.problem_type = "single_label_classification" if classes else "regression"
    config.pad_token_id = pad
    if isinstance(config, ClearheadConfig):
        config.dropout = DROPOUT if dropout is None else dropout
    elif dropout is not None:
        raise ClearheadError(
            f"dropout={dropout} is for clearhead models; {config.model_type} has settings of its "
            "own: leave it out, and set those in the checkpoint's config.json"
        )
