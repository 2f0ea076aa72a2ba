"""clearhead train: one model."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.data import DataConfig, prepare
from clearhead.experiments.building import batches, best_device, fitted
from clearhead.models import ClearheadForCausalLM, plan, preset
from clearhead.train import Callback, Progress, TensorBoard, Trackio, TrainConfig, train

TRACKERS = {"tensorboard": TensorBoard, "trackio": Trackio}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One training run."""

    preset: Positional[str] = "transformer"
    """A preset: clearhead plan lists them."""
    size: str = "tiny"
    """tiny or small."""
    output: Path = Path("runs/train")
    """The run folder."""
    resume: bool = False
    """Go on with the run in the folder."""
    set: tuple[str, ...] = ()
    """Changes to the preset's configuration, KEY=VALUE, such as maps=differential."""
    track: tuple[Literal["tensorboard", "trackio"], ...] = ()
    """Trackers beside metrics.jsonl; each is an extra."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="train",
        description="Train one model; OUTPUT/final is then a plain Hugging Face checkpoint.",
    )
    changes = overrides(command.set)
    preset(command.preset, command.size, **changes)  # refuses before anything is read
    trackers: list[Callback] = [TRACKERS[name]() for name in command.track]
    corpus = prepare(command.data, progress=_say)
    config = fitted(command.preset, command.size, corpus, command.train, **changes)
    counts = plan(config)
    _say(f"{command.preset}: {counts.parameters:,} parameters")
    torch.manual_seed(command.train.seed)
    result = train(
        ClearheadForCausalLM(config).to(best_device()),
        batches(corpus, command.train),
        command.train,
        output=command.output,
        tokenizer=corpus.tokenizer,
        resume=command.resume,
        callbacks=[Progress(), *trackers],
        description={"preset": command.preset, "size": command.size, "data": corpus.describe()},
    )
    if result.stop_signal is not None:
        _say(f"stopped and saved at step {result.steps}: add --resume to go on")
        return 128 + result.stop_signal
    _say(f"loss {result.final_loss:.4f}; model: {command.output / 'final'}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
