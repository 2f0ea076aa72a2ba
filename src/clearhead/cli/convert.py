"""clearhead convert: a model of transformers as a clearhead model, and back."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.consent import OpensModels
from clearhead.metavars import Model
from clearhead.records import manifest
from clearhead.terminal import show


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A conversion."""

    model: Positional[Model]
    """A Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX, DiffLlama, GraniteSWA or dense Flint, or a
    clearhead model that is a Llama, Mistral, Qwen3, DiffLlama or GraniteSWA: a folder or a hub
    name."""
    output: Positional[Path]
    """The folder of the converted model, which does not exist yet."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="convert",
        description="Write a model in the other format, once both have given the same logits.",
        examples=("./SmolLM2-135M ./smollm2-clearhead", "runs/train/final ./as-llama"),
    )
    from clearhead.experiments.checkpoints import load_model
    from clearhead.models.conversion import converted, require_convertible
    from clearhead.records.files import publish_folder, require_new
    from clearhead.train.checkpoint import save_pretrained

    require_new(command.output)
    require_convertible(command.model, trust_remote_code=command.trust_remote_code)
    model, tokenizer = load_model(command.model, trust_remote_code=command.trust_remote_code)
    made = converted(model)
    with publish_folder(command.output) as folder:
        save_pretrained(made, tokenizer, folder)
        manifest.seal(folder)
    show(f"{type(model).__name__} → {type(made).__name__}, with equal logits: {command.output}")
    return 0
