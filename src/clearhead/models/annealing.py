"""Parts of a model that move with training beside its weights, in any training loop.

Such a part has `on_step_end(done, loss)` and keeps its numbers in buffers. It moves at every step
of a torch optimizer that follows a forward pass in training; Trainer says how long training is.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from clearhead.errors import ClearheadError

_WAYS = "shaping='annealed', residual_scale='scheduled' or annealed_start=True"
_trained = WeakSet[nn.Module]()  # trunks that a gradient passes through, since the last step


@dataclass
class Course:
    """The training of a trunk: its length in steps, where known, and the steps done.

    Attributes:
        driven: a training loop of clearhead calls `advance` itself.
        losses: of the passes since the last step, their sum, and the number that are means.
    """

    steps: int | None = None
    step: int = 0
    driven: bool = False
    losses: Tensor | None = None

    @classmethod
    def of(cls, trunk: nn.Module) -> "Course | None":
        """A course for a trunk that has parts to move."""
        if not _parts(trunk):
            return None
        _join_trainers()
        return cls()

    def note(self, trunk: nn.Module, x: Tensor) -> None:
        """Note a forward pass, which is of training where x has a gradient."""
        if trunk.training and x.requires_grad:
            _trained.add(trunk)

    def note_loss(self, trunk: nn.Module, loss: Tensor, mean: bool) -> None:
        """Note the loss of a forward pass: a mean, or its share in that of a whole batch."""
        self.note(trunk, loss)
        if trunk.training:
            share = torch.stack([loss.detach(), loss.new_full((), mean)])
            self.losses = share if self.losses is None else self.losses + share


def anneal(model: nn.Module, steps: int, *, first_step: int = 0) -> None:
    """Move the annealed and scheduled parts of a model over the next optimizer steps.

    For a training loop of your own: clearhead's training and Trainer say so themselves.

    Args:
        steps: optimizer steps of the whole training.
        first_step: steps done before, where a training goes on.

    Raises:
        ClearheadError: for a model without such parts, and for numbers that do not fit.
    """
    if not _courses(model):
        raise ClearheadError(f"this model has no part that training moves: build it with {_WAYS}")
    if not 0 <= first_step < steps:
        raise ClearheadError(
            f"steps is {steps} and first_step {first_step}: give a number of steps that is at "
            "least 1 and greater than those done"
        )
    _begin(model, steps, first_step)


def begin_run(model: nn.Module) -> None:
    """Clear what parts keep of an earlier training alone."""
    for module in model.modules():
        if hasattr(module, "on_run_begin"):
            module.on_run_begin()


def advance(model: nn.Module, done: float, loss: float) -> None:
    """Move the parts after a step: `done` of the training, from 0 to 1, and the step's loss."""
    for module in model.modules():
        if hasattr(module, "on_step_end"):
            module.on_step_end(done, loss)


@contextmanager
def driven(model: nn.Module) -> Iterator[None]:
    """Leave the parts to the body, which calls `advance`."""
    courses = _courses(model)
    for course in courses:
        course.driven = True
    try:
        yield
    finally:
        for course in courses:
            course.driven = False


def _courses(model: nn.Module) -> list[Course]:
    found = (getattr(module, "course", None) for module in model.modules())
    return [each for each in found if isinstance(each, Course)]


def _parts(model: nn.Module) -> list[Any]:
    parts = (module for module in model.modules() if hasattr(module, "on_step_end"))
    return [part for part in parts if next(part.buffers(), None) is not None]


def _begin(model: nn.Module, steps: int | None, step: int = 0) -> None:
    for course in _courses(model):
        course.steps, course.step, course.losses = steps, step, None
    if steps is not None and step == 0:
        begin_run(model)


@cache
def _join_trainers() -> None:
    """Have every Trainer of transformers announce its steps; it has no other hook for a model."""
    from transformers import TrainerCallback, trainer

    class TrainingSteps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            _begin(of["model"], state.max_steps, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            _begin(of["model"], None)

    trainer.DEFAULT_CALLBACKS.append(TrainingSteps)


def _after_step(*_: Any) -> None:
    """Move the parts now, or after a backward pass that is under way, which still reads them."""
    if _trained and torch._C._current_graph_task_id() != -1:
        Variable._execution_engine.queue_callback(_move)
    elif _trained:
        _move()


def _move() -> None:
    """Move the parts of every model trained: once, however many optimizers share its weights."""
    trunks = list(_trained)
    _trained.clear()
    for trunk in trunks:
        course: Any = trunk.course
        total, means = (math.nan, 0) if course.losses is None else course.losses.tolist()
        course.losses = None
        if not course.driven:
            _count(trunk, course, total / max(means, 1))


def _count(trunk: nn.Module, course: Course, loss: float) -> None:
    course.step += 1
    if course.steps is None:
        if course.step == 1 and any(_waits(part) for part in _parts(trunk)):
            warnings.warn(
                f"the parts of this model that training moves ({_WAYS}) stay as they are: call "
                "clearhead.anneal(model, steps=...) before the training loop",
                stacklevel=6,
            )
        advance(trunk, 0.0, loss)
        return
    advance(trunk, min(course.step / course.steps, 1.0), loss)
    if course.step >= course.steps:
        course.steps, course.step = None, 0


def _waits(part: Any) -> bool:
    """True where a part depends on how much of the training is done, and has not arrived."""
    now = [buffer.clone() for buffer in part.buffers()]
    ends = []
    for done in (0.0, 1.0):
        part.on_step_end(done, 0.0)
        ends.append([buffer.clone() for buffer in part.buffers()])
        for buffer, value in zip(part.buffers(), now, strict=True):
            buffer.copy_(value)
    return not all(map(torch.equal, *ends))


register_optimizer_step_post_hook(_after_step)
