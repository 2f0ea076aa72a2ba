"""clearhead convert: a Llama or DiffLlama as a clearhead model, and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from clearhead.cli.models import load_model
from clearhead.cli.options import parse
from clearhead.diagnose.running import longest_text
from clearhead.errors import ClearheadError
from clearhead.models.conversion import converted
from clearhead.train.atomic import publish_folder
from clearhead.train.checkpoint import save_pretrained

TOKENS = 64  # that both read, to be compared
# Of the largest logit: what the order of sums may change, and no more.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to convert, and where to."""

    model: Positional[str]
    """A Llama or DiffLlama, or a clearhead model that is one: a folder or a hub name."""
    output: Positional[Path]
    """The folder of the converted model, which does not exist yet."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="convert",
        description="Write a model in the other format, once both have given the same logits.",
    )
    if command.output.exists():
        raise ClearheadError(f"{command.output} exists: give the folder of a model not made yet")
    model, tokenizer = load_model(command.model)
    made = converted(model)
    difference = _difference(model, made)
    if not difference <= TOLERANCE[made.dtype]:
        raise ClearheadError(
            f"{command.model} converted gives other logits, by {difference:.2g} of the largest: "
            "nothing is written; please report this model"
        )
    with publish_folder(command.output) as folder:
        save_pretrained(made, tokenizer, folder)
    kinds = f"{type(model).__name__} → {type(made).__name__}"
    told = f"{kinds}: logits of {_length(made)} tokens differ by {difference:.1g} of the largest"
    print(f"{told}\nmodel: {command.output}")
    return 0


def _length(model: Any) -> int:
    return min(TOKENS, longest_text(model) or TOKENS)


def _difference(model: Any, made: Any) -> float:
    """The largest difference of two models' logits, over the largest logit."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, _length(made)), generator=draw)
    with torch.no_grad():
        one, other = (each(ids.to(model.device)).logits.double() for each in (model, made))
    return float((one - other).abs().max() / one.abs().max())
