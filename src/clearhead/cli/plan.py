"""Estimate the costs of models before a weight exists: parameters, memory by part, FLOPs, the time
of their training, and the cache of keys and values.

examples:
  clearhead plan
  clearhead plan differential --size diff-1.4b --train.tokens 30000000000 --gpus 1 8
  clearhead plan transformer --size diff-3b --gpus 64 --train.checkpointing blocks
"""

from dataclasses import dataclass, field
from typing import Literal

from clearhead.lab.sweep_configs import PlanConfig
from clearhead.ranges import Count, Length
from clearhead.settings.train import TrainConfig
from clearhead.terminal import show, write

Kind = Literal["cpu", "rtx4090", "l40s", "a100", "h100", "h200", "b200", "mi300x"]


@dataclass(frozen=True, kw_only=True)
class Command(PlanConfig):
    """Models to count."""

    recipes: bool = False
    """Print the published runs, each with the command that trains it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Settings of the training."""
    gpu: tuple[Kind, ...] = ("cpu", "a100", "h100", "h200")
    """Devices to train on: GPUs, or this machine's cpu."""
    gpus: tuple[Count, ...] = (1,)
    """Numbers of GPUs, with weights and optimizer sharded over them."""
    context: Length | None = None
    """Tokens of the text whose keys and values are counted; by default the model's own length."""


def run(command: Command) -> int:
    if command.recipes:
        from clearhead.papers.recipes import commands

        write("\n".join(commands()))
        return 0
    from clearhead.lab.bill import named_configs, print_bill, print_overview

    if not command.models:
        print_overview(command.size, command.set)
    for name, config in named_configs(command, command.train):
        show(name)
        print_bill(config, command)
    return 0
