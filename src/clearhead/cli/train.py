"""clearhead train: one model."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.data.config import SHARE, DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import masked_recipe
from clearhead.metavars import Pair, Preset, Size
from clearhead.ranges import Part
from clearhead.terminal import say
from clearhead.train.config import TrainConfig

if TYPE_CHECKING:
    from clearhead.train.world import World


@dataclass(frozen=True, kw_only=True)
class Command:
    """One training run."""

    preset: Positional[Preset] = "transformer"
    """Preset to train; clearhead plan says what each is."""
    size: Size = "tiny"
    """tiny, small, or a paper's own: codeparrot, codeparrot-72, languini, crammed."""
    objective: Literal["next-token", "mlm"] = "next-token"
    """Prediction of the next token, or of hidden ones (mlm). With mlm the defaults are the crammed
    BERT's recipe: add --objective mlm to --help to see them."""
    mask: Part | None = None
    """Share of the tokens that mlm hides; 0.25 where not given."""
    output: Path = Path("runs/train")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in the output folder."""
    set: tuple[Pair, ...] = ()
    """Changes to the preset's configuration, such as maps=differential."""
    track: tuple[Literal["tensorboard", "trackio"], ...] = ()
    """Trackers to log to, beside metrics.jsonl; each needs its extra."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Settings of the training."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""


def run(words: list[str]) -> int:
    masked = ("--objective", "mlm") in pairwise(words) or "--objective=mlm" in words
    command = parse(
        Command,
        words,
        verb="train",
        description="Train one model; OUTPUT/final is then a plain Hugging Face checkpoint.",
        examples=(
            "sas-p --data.data my/texts --train.tokens 2000000 --output runs/sas-p",
            "bert --objective mlm --output runs/bert",
        ),
        presets=True,
        default=Command(objective="mlm", train=masked_recipe()) if masked else None,
    )
    from clearhead.train.world import joined

    settings = command.train
    with joined(settings.timeout, alone=settings.parallel != "fsdp") as world:
        return _train(command, world)


def _train(command: Command, world: "World") -> int:
    import torch

    from clearhead.data import prepare, with_mask_token
    from clearhead.experiments.building import (
        OBJECTIVES,
        batches,
        check_objective,
        check_room,
        fitted,
        masked_batches,
    )
    from clearhead.models import plan, preset
    from clearhead.models.loading import best_device
    from clearhead.train import BatchSource, Progress, TensorBoard, Trackio, train

    trackers = {"tensorboard": TensorBoard, "trackio": Trackio}
    changes = overrides(command.set)
    config = preset(command.preset, command.size, **changes)  # refuses before anything is read
    check_objective(command.objective, config)
    share = _share(command)
    corpus = world.in_turn(lambda: prepare(command.data, progress=say))
    if share is not None:
        corpus = with_mask_token(corpus)
    config = fitted(command.preset, command.size, corpus, command.train, **changes)
    check_room(config, command.train)
    counts = plan(config)
    say(f"{command.preset}: {counts.parameters:,} parameters")
    torch.manual_seed(command.train.seed)
    made: BatchSource = batches(corpus, command.train)
    if share is not None:
        made = masked_batches(corpus, command.train, share)
    result = train(
        OBJECTIVES[command.objective](config).to(best_device()),
        made,
        command.train,
        output=command.output,
        tokenizer=corpus.tokenizer,
        resume=command.resume,
        callbacks=[Progress(), *(trackers[name]() for name in command.track)],
        description={
            "preset": command.preset,
            "size": command.size,
            "objective": command.objective,
            "mask": share,
            "data": corpus.describe(),
        },
    )
    if result.stop_signal is not None:
        say(f"stopped and saved at step {result.steps}: add --resume to go on")
        return 128 + result.stop_signal
    say(f"loss {result.final_loss:.4f}; model: {command.output / 'final'}")
    return 0


def _share(command: Command) -> float | None:
    """The share of tokens hidden; None where the next token is learnt."""
    if command.objective != "mlm":
        if command.mask is not None:
            raise ClearheadError("mask has no effect without --objective mlm: leave it out")
        return None
    return SHARE if command.mask is None else command.mask
