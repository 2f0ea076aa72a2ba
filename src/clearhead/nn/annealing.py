"""Parts of a model that move with training beside its weights, in any training loop.

Such a part has `on_step_end(done)` and keeps its numbers in buffers. It moves at every step
of a torch optimizer that follows a forward pass in training.
"""

import warnings
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from clearhead.errors import ClearheadError

_passes: Any = WeakSet()  # trunks in training since the last step


def moves(trunk: nn.Module) -> bool:
    """True if a trunk has parts that move in training; Trainers then announce their steps."""
    if not _parts(trunk):
        return False
    _join_trainers()
    return True


def note(trunk: nn.Module, x: Tensor) -> None:
    """Note a forward pass in training, if x has a gradient."""
    if trunk.training and x.requires_grad:
        _passes.add(trunk)


def anneal(model: nn.Module, steps: int, *, first_step: int = 0) -> None:
    """Move the annealed parts of a model over the next optimizer steps.

    For your own training loop; clearhead's training and transformers' Trainer need no call.

    Args:
        steps: optimizer steps of the whole training.
        first_step: steps already done, in a training that is resumed.

    Raises:
        ClearheadError: a model without such parts, or numbers that do not fit.
    """
    if not _parts(model):
        raise ClearheadError(
            "this model has no part that training moves: build it with annealed_start=True"
        )
    if not 0 <= first_step < steps:
        raise ClearheadError(
            f"steps is {steps} and first_step {first_step}: give a number of steps that is at "
            "least 1 and greater than those done"
        )
    _begin(model, first_step, steps)


def advance(model: nn.Module, done: float) -> None:
    """Move the parts, which the optimizer's step then leaves alone; `done` is from 0 to 1."""
    module: Any
    for module in model.modules():
        _passes.discard(module)
        _passes.data.discard(module)
        if hasattr(module, "on_step_end"):
            module.on_step_end(done)


def _parts(model: nn.Module) -> list[Any]:
    parts = (module for module in model.modules() if hasattr(module, "on_step_end"))
    return [part for part in parts if next(part.buffers(), None) is not None]


def _begin(model: nn.Module, step: int, steps: int | None) -> None:
    for module in model.modules():
        if hasattr(module, "course"):
            module.course = None if steps is None else (step, steps)  # type: ignore[assignment]


@cache
def _join_trainers() -> None:
    """Have every Trainer of transformers announce its steps; it has no other hook for a model."""
    from transformers import TrainerCallback, trainer

    class TrainingSteps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            _begin(of["model"], state.global_step, state.max_steps)

        def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            _begin(of["model"], 0, None)

    trainer.DEFAULT_CALLBACKS.append(TrainingSteps)


def _after_step(*_: Any) -> None:
    """Move the parts now, or after a backward pass that is under way, which still reads them."""
    if _passes and torch._C._current_graph_task_id() != -1:
        Variable._execution_engine.queue_callback(_move)
    elif _passes:
        _move()


def _move() -> None:
    """Move the parts of every model trained: once, however many optimizers share its weights."""
    for trunk in _trained():
        step, steps = trunk.course or (0, 0)  # type: ignore[misc]
        if trunk.course is None and any(map(_waits, _parts(trunk))):
            warnings.warn(
                "the parts of this model that training moves (annealed_start) stay as they are: "
                "call clearhead.anneal(model, steps=...) before the training loop",
                stacklevel=5,
            )
        trunk.course = None if step + 1 == steps else (step + 1, steps)  # type: ignore[assignment]
        advance(trunk, (step + 1) / steps if steps else 0.0)


def _trained() -> list[Any]:
    """The trunks noted. torch 2.15 compiles the noting so that a module itself is in the set."""
    noted = [item if isinstance(item, nn.Module) else item() for item in list(_passes.data)]
    return [*{id(trunk): trunk for trunk in noted if trunk is not None}.values()]


def _waits(part: Any) -> bool:
    """True where a part depends on how much of the training is done, and has not arrived."""
    now, ends = [buffer.clone() for buffer in part.buffers()], []
    for done in (0.0, 1.0):
        part.on_step_end(done)
        ends.append([buffer.clone() for buffer in part.buffers()])
        for buffer, value in zip(part.buffers(), now, strict=True):
            buffer.copy_(value)
    return not all(map(torch.equal, *ends))


register_optimizer_step_post_hook(_after_step)
