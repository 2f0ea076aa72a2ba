"""Models that a user names: checkpoints, and configurations with fresh weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import clearhead.models  # registers our model type with transformers
from clearhead.data import Corpus, DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.building import best_device, fitted
from clearhead.models.loading import (
    auto_class,
    explained,
    kind_of,
    load,
    load_config,
    load_tokenizer,
    resolved,
)
from clearhead.train import TrainConfig


def load_model(
    name: str, kinds: tuple[str, ...] = ("causal",), *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the best device, and its tokenizer.

    Raises:
        ClearheadError: as `clearhead.models.loading.load`.
    """
    model, tokenizer = load(name, kinds, trust_remote_code=trust_remote_code)
    return model.to(best_device()), tokenizer


def refuse_tokenizer(data: DataConfig) -> None:
    """Raise a ClearheadError where a tokenizer is asked for beside a model that has its own."""
    for name in ("tokenizer", "vocabulary"):
        if getattr(data, name) != getattr(DataConfig, name):
            raise ClearheadError(f"data.{name} has no effect here: text is read by the model's own")


def own_text(data: DataConfig, tokenizer: Any, *, progress: Callable[[str], None]) -> Corpus:
    """The text as a model's own tokenizer reads it; one without an end token closes nothing."""
    return prepare(data, tokenizer=tokenizer, progress=progress, closed=False)


def is_preset(name: str) -> bool:
    """Whether an untrained model is a preset's, not one of a checkpoint's configuration."""
    return not Path(name).is_dir()


def untrained(
    name: str,
    size: str,
    changes: Mapping[str, Any],
    data: DataConfig,
    *,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> tuple[Any, Corpus]:
    """A preset, or the configuration of a checkpoint, with fresh weights; and its text.

    Raises:
        ClearheadError: where there is neither a preset nor a checkpoint of that name.
    """
    if is_preset(name):
        corpus = prepare(data, progress=say)
        config = fitted(name, size, corpus, TrainConfig(), **changes)
        kind: Any = clearhead.models.ClearheadForCausalLM
        if config.direction != "causal":
            kind = clearhead.models.ClearheadForMaskedLM
        return kind(config).to(best_device()).eval(), corpus
    name = resolved(name)
    auto = auto_class(kind_of(name, trust_remote_code=trust_remote_code))
    with explained(name):
        config = load_config(name, trust_remote_code=trust_remote_code, **changes)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    return model.to(best_device()).eval(), own_text(data, tokenizer, progress=say)
