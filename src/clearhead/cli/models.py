"""Loading a checkpoint that the user names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import clearhead.models  # registers our model type with transformers
from clearhead.cli.options import overrides
from clearhead.data import Corpus, DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.building import best_device, fitted
from clearhead.train import TrainConfig


def load_model(name: str, kinds: tuple[str, ...] = ("causal",)) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the best device, and its tokenizer.

    A kind is "causal", "masked" or "bare": saved without a head for language.

    Only safetensors are read, and no code that a checkpoint brings is run.

    Raises:
        ClearheadError: where there is no such model, its files are damaged, or it is of another
            kind.
    """
    from transformers import AutoTokenizer

    name = resolved(name)
    kind = _kind(name)
    if kind == "masked" and kind not in kinds:
        raise ClearheadError(f"{name} predicts hidden tokens, not the next: give a causal one")
    if kind not in kinds:  # a bare trunk may still be completed; transformers says if it cannot
        kind = "causal"
    with _explained(name):
        model = _auto(kind).from_pretrained(name, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(best_device()).eval(), tokenizer


def untrained(
    name: str,
    size: str,
    changes: tuple[str, ...],
    data: DataConfig,
    *,
    say: Callable[[str], None],
) -> tuple[Any, Corpus]:
    """A preset, or the configuration of a checkpoint, with fresh weights; and its text.

    Raises:
        ClearheadError: where there is neither a preset nor a checkpoint of that name.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not Path(name).is_dir():
        corpus = prepare(data, progress=say)
        config = fitted(name, size, corpus, TrainConfig(), **overrides(changes))
        kind: Any = clearhead.models.ClearheadForCausalLM
        if config.direction != "causal":
            kind = clearhead.models.ClearheadForMaskedLM
        return kind(config).to(best_device()).eval(), corpus
    name = resolved(name)
    auto = _auto(_kind(name))
    with _explained(name):
        config = AutoConfig.from_pretrained(name, **overrides(changes))
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = auto.from_config(config).to(best_device()).eval()
    return model, prepare(replace(data, tokenizer=tokenizer.name_or_path), progress=say)


def _kind(name: str) -> str:
    """What the checkpoint was saved as."""
    from transformers import AutoConfig

    with _explained(name):
        config = AutoConfig.from_pretrained(name)
    if getattr(config, "is_encoder_decoder", False):
        raise ClearheadError(
            f"{name!r} is an encoder-decoder ({config.model_type}): "
            "give a decoder-only language model or an encoder"
        )
    saved = next(iter(getattr(config, "architectures", None) or ()), "ForCausalLM")
    if saved.endswith("ForMaskedLM"):
        return "masked"
    return "causal" if saved.endswith(("ForCausalLM", "LMHeadModel")) else "bare"


def _auto(kind: str) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    return {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "bare": AutoModel}[kind]


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """In one line why a checkpoint cannot be loaded."""
    try:
        yield
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ClearheadError(
            f"cannot load a model from {name!r} ({reason}): give a folder with config.json, "
            "model.safetensors and a tokenizer, such as RUN/final, or a hub name"
        ) from error


def resolved(name: str) -> str:
    """A run folder's finished model is meant by the folder; any other name stays."""
    return str(Path(name, "final")) if Path(name, "final").is_dir() else name
