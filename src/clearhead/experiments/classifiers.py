"""A checkpoint of any kind as a classifier with its tokenizer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import clearhead.models  # registers our model type with transformers  # noqa: F401
from clearhead.errors import ClearheadError
from clearhead.models import ClearheadConfig
from clearhead.models.loading import explained
from clearhead.records.manifest import verify_model

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)


def checkpoint_path(name: str) -> str:
    """`name`, or the finished model in it where it is a run's folder."""
    finished = Path(name, "final")
    return str(finished) if finished.is_dir() else name


def load_tokenizer(name: str) -> Any:
    """The checkpoint's tokenizer; its end token pads where it has none for that.

    Raises:
        ClearheadError: where there is none.
    """
    from transformers import AutoTokenizer

    with _loading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint_path(name))
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_classifier(
    name: str, classes: Sequence[str], *, tokenizer: Any, dropout: float | None
) -> Any:
    """A model that classifies, its head new unless the checkpoint has one of that size.

    The checkpoint is a causal model's, a masked one's, a classifier's, or any encoder's that
    transformers knows. Only safetensors are read, and no code that a checkpoint brings is run. A
    new head is drawn from PyTorch's generator.

    Args:
        classes: their names, which the model keeps as id2label; none for a regression.
        dropout: of a clearhead model; None is 0.1. Other models have settings of their own.

    Returns:
        The model, on the CPU.

    Raises:
        ClearheadError: where there is no such model, or `dropout` is for one that is not ours.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = checkpoint_path(name)
    verify_model(Path(path))
    with _loading("classifier", name):
        config = AutoConfig.from_pretrained(path)
        _prepare(config, classes, tokenizer.pad_token_id, dropout)
        return AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # a head of another number of classes is made anew
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


@contextmanager
def _loading(what: str, name: str) -> Iterator[None]:
    """One line for whatever fails, and no report of a new head, which is meant to be new."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with explained(name, what):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
