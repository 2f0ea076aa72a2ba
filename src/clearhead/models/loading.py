"""Checkpoints that the user names: what opens them, and in one line why one does not open."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.manifest import verify_model


def load(name: str, kinds: tuple[str, ...] = ("causal",)) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the CPU, and its tokenizer.

    A kind is "causal", "masked" or "bare": saved without a head for language.

    Only safetensors are read, and no code that a checkpoint brings is run.

    Raises:
        ClearheadError: where there is no such model, its files are damaged, or it is of another
            kind.
    """
    from transformers import AutoTokenizer

    name = resolved(name)
    verify_model(Path(name))
    kind = kind_of(name)
    if kind == "masked" and kind not in kinds:
        raise ClearheadError(f"{name} predicts hidden tokens, not the next: give a causal one")
    if kind not in kinds:  # a bare trunk may still be completed; transformers says if it cannot
        kind = "causal"
    with explained(name):
        model = auto_class(kind).from_pretrained(name, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.eval(), tokenizer


def kind_of(name: str) -> str:
    """What the checkpoint was saved as."""
    from transformers import AutoConfig

    with explained(name):
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


def auto_class(kind: str) -> Any:
    """The class of transformers that opens checkpoints of a kind."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    return {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "bare": AutoModel}[kind]


@contextmanager
def explained(name: str, what: str = "model") -> Iterator[None]:
    """In one line why `what` of a checkpoint cannot be loaded."""
    try:
        yield
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ClearheadError(
            f"cannot load a {what} from {name!r} ({reason}): give a folder with config.json, "
            "model.safetensors and a tokenizer, such as RUN/final, or a hub name"
        ) from error


def resolved(name: str) -> str:
    """A run folder's finished model is meant by the folder; any other name stays."""
    return str(Path(name, "final")) if Path(name, "final").is_dir() else name
