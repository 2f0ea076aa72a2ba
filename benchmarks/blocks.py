"""The simplified blocks against the pre-norm block: training, forward alone, decoding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

from benchmarks.race import Ratio, faster_paths
from benchmarks.timing import take_turns
from benchmarks.training import FOR_LIFE, optimizer_step
from clearhead.models import BASELINE, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.train import TrainConfig, precision
from clearhead.train.compiling import compiled

Model = TypeVar("Model", ClearheadForCausalLM, ClearheadForMaskedLM)

# A decoded text's prompt, the tokens that are decoded after it in one turn, and the texts.
PROMPT, DECODED, DECODED_ROWS = 128, 32, 8


@dataclass(frozen=True)
class Setting:
    """A machine's own: what it can train in a blink, and what was promised there.

    Attributes:
        size, changes: of every preset. Equal width and depth: the simplified blocks have fewer
            parameters, which is their claim.
        batch, length: of a step.
        bounds: the time that each block may take of the baseline's; None where nothing was said.
    """

    size: str
    changes: dict[str, Any]
    batch: int
    length: int
    bounds: dict[str, float | None]


CPU = Setting(
    size="tiny",
    changes={
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "vocab_size": 4096,
        "max_position_embeddings": 256,
        "mlp": "relu",
    },
    batch=8,
    length=256,
    bounds={"parallel": 1 / 1.0, "sas": 1 / 1.0, "sas-p": 1 / 1.06},
)
# The paper's own shape and batch (arXiv 2311.01906, D.1), which fill such a device.
GPU = Setting(
    size="codeparrot",
    changes={},
    batch=128,
    length=128,
    bounds={"parallel": 1 / 1.0, "sas": 1 / 1.08, "sas-p": 1 / 1.15},
)


# Blocks of which nothing was promised: those that learn too little, or break, with depth.
MEASURED = ("skipless", "sas-p-nonorm")


def blocks(rounds: int) -> Iterator[Ratio]:
    """Each block's seconds over the pre-norm block's, in turns; training by the faster path.

    Every model is at its own start, but that W_Q is drawn: from 0, equal scores would be measured.
    """
    bounds = _setting().bounds | dict.fromkeys(MEASURED)
    names = (BASELINE, *bounds)
    jobs: dict[str, tuple[Callable[[str, str], Callable[[], None]], tuple[str, ...]]] = {
        "blocks, training step": (_training, ("eager", "compiled")),
        "blocks, forward": (_forward, ("eager", "compiled")),
        "blocks, decoding": (_decoding, ("eager",)),
    }
    for title, (make, paths) in jobs.items():
        torch._dynamo.reset()
        sides = {f"{name}, {path}": make(name, path) for name in names for path in paths}
        seconds = take_turns(sides, rounds)
        for name, bound in bounds.items():
            yield faster_paths(title, name, BASELINE, bound, seconds)


def _setting() -> Setting:
    return GPU if best_device().type == "cuda" else CPU


def built(kind: type[Model], setting: Setting, name: str, path: str) -> Model:
    """A preset at its start, W_Q drawn; `path` is "eager" or "compiled"."""
    config = preset(name, setting.size, **setting.changes, query_range=0.02)
    model = kind(config).to(best_device())
    if path == "compiled":
        FOR_LIFE.enter_context(compiled(model, "blocks"))
    return model


def _ids(model: ClearheadForCausalLM, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (rows, length), device=model.device)


def _training(name: str, path: str) -> Callable[[], None]:
    setting = _setting()
    model = built(ClearheadForCausalLM, setting, name, path).train()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-4))
    return optimizer_step(model, optimizer, _ids(model, setting.batch, setting.length))


def _forward(name: str, path: str) -> Callable[[], None]:
    setting = _setting()
    model = built(ClearheadForCausalLM, setting, name, path).eval()
    ids = _ids(model, setting.batch, setting.length)

    def step() -> None:
        with torch.no_grad(), precision.autocast("bf16", ids.device):
            model(ids, use_cache=False, logits_to_keep=1)

    return step


def _decoding(name: str, path: str) -> Callable[[], None]:
    """One token at a time after a prompt, which is not read anew in each turn: cropped back to."""
    model = built(ClearheadForCausalLM, _setting(), name, path).eval()
    ids = _ids(model, DECODED_ROWS, PROMPT + DECODED)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)

    def step() -> None:
        with torch.no_grad():
            for at in range(PROMPT, PROMPT + DECODED):
                model(ids[:, at : at + 1], past_key_values=cache)
        cache.crop(-DECODED)

    return step
