"""Annealed parts of a model: buffers that `on_step_end(done)` sets, done from 0 to 1."""

import warnings
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn

from clearhead.errors import ClearheadError


def moves(trunk: nn.Module) -> bool:
    """True if a trunk has annealed parts; transformers' Trainers are then made to update them."""
    if not _parts(trunk):
        return False
    _join_trainers()
    return True


def anneal(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first_step: int = 0
) -> None:
    """Update the annealed parts of a model after each of the optimizer's next steps.

    For your own training loop; clearhead's training and transformers' Trainer need no call.

    Args:
        model: one that has such parts, built with annealed_start=True.
        optimizer: any one of them, where a model has several.
        steps: optimizer steps of the whole training.
        first_step: steps already done, in a training that is resumed.
    """
    if not _parts(model):
        raise ClearheadError("no part that training moves: build it with annealed_start=True")
    if not 0 <= first_step < steps:
        raise ClearheadError(f"steps is {steps}: give more than first_step, which is {first_step}")
    done = first_step

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        advance(model, min(1.0, done / steps))

    advance(model, done / steps)
    optimizer.register_step_post_hook(after)


def advance(model: nn.Module, done: float) -> None:
    """Set the parts to their state after a share `done` of the training, from 0 to 1."""
    module: Any
    for module in model.modules():
        if hasattr(module, "followed"):
            module.followed = True
        if hasattr(module, "on_step_end"):
            module.on_step_end(done)


def warn(trunk: nn.Module) -> None:
    """Warn of annealed parts that stay fixed, since the training never called `anneal`."""
    for part in _parts(trunk):
        end = deepcopy(part)  # the graph of a pass that is under way holds the part's own buffers
        end.on_step_end(1.0)
        if not all(map(torch.equal, end.buffers(), part.buffers())):
            advice = "call clearhead.anneal(model, optimizer, steps) before the training loop"
            warnings.warn(f"annealed parts of this model stay as they are: {advice}", stacklevel=2)
            return


def _parts(model: nn.Module) -> list[Any]:
    parts = (module for module in model.modules() if hasattr(module, "on_step_end"))
    return [part for part in parts if next(part.buffers(), None) is not None]


@cache
def _join_trainers() -> None:
    """Have every Trainer of transformers move the parts."""
    from transformers import TrainerCallback, trainer

    class Annealing(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            advance(of["model"], state.global_step / max(1, state.max_steps))

        on_step_end = on_train_begin

    trainer.DEFAULT_CALLBACKS.append(Annealing)
