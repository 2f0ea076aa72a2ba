"""Fine-tuning on labelled texts: a few epochs of an ordinary classifier, in memory, whole or not.

Short beside a pretraining run, so it keeps no checkpoints: what is published at its end is whole,
and a run that is stopped leaves nothing.
"""

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.optim import decay_groups, learning_rate
from clearhead.train import precision
from clearhead.train.config import FinetuneConfig
from clearhead.train.interrupt import StopSignals
from clearhead.train.result import DivergedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Batches(Protocol):
    """`clearhead.data.LabelledBatches`, or anything like it."""

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """What the model's forward takes by name, "labels" [B] among it."""


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """A run that finished, or the signal that stopped it."""

    steps: list[dict[str, Any]]
    """Of each step: step, epoch, loss, learning_rate, gradient_norm, seconds."""
    stop_signal: signal.Signals | None
    """None where it finished."""


def finetune(
    model: "PreTrainedModel",
    batches: Batches,
    config: FinetuneConfig,
    *,
    seed: int,
    say: Callable[[str], None],
) -> Finetuned:
    """Train `model` in place, on the device it is on; it is in evaluation mode afterwards.

    Batches are taken in order, `config.epochs` times `batches.per_epoch` of them. `seed` fixes the
    dropout. SIGINT and SIGTERM stop the run after the step at hand.

    Raises:
        DivergedError: for a loss or a gradient that is not finite.
    """
    model.float()
    mode = precision.resolve(config.precision, model.device)
    schedule = _Schedule(config=config, steps=config.epochs * batches.per_epoch)
    optimizer = torch.optim.AdamW(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
    )
    torch.manual_seed(seed)
    model.train()
    steps: list[dict[str, Any]] = []
    started = time.perf_counter()
    with StopSignals() as stop:
        for step in range(schedule.steps):
            rate = learning_rate(step, schedule)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            loss, norm = _step(model, batches.batch(step), mode, config, where=f"step {step + 1}")
            optimizer.step()
            seconds = time.perf_counter() - started
            epoch = step // batches.per_epoch + 1
            steps.append(
                {
                    "step": step + 1,
                    "epoch": epoch,
                    "seconds": seconds,
                    "loss": loss,
                    "learning_rate": rate,
                    "gradient_norm": norm,
                }
            )
            if (step + 1) % batches.per_epoch == 0:
                recent = [line["loss"] for line in steps[-batches.per_epoch :]]
                mean = sum(recent) / len(recent)
                say(f"epoch {epoch} of {config.epochs}: training loss {mean:.4f}, {seconds:.0f} s")
            if stop.received is not None:
                break
    model.eval()
    finished = len(steps) == schedule.steps
    return Finetuned(steps=steps, stop_signal=None if finished else stop.received)


def _step(
    model: "PreTrainedModel",
    batch: Mapping[str, torch.Tensor],
    mode: precision.Resolved,
    config: FinetuneConfig,
    *,
    where: str,
) -> tuple[float, float]:
    """Gradients of one batch, clipped; its loss, and the norm before clipping."""
    device = model.device
    with precision.autocast(mode, device):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    loss.backward()
    gradients = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in gradients])
    told, length = torch.stack([loss.detach().float(), norm]).tolist()
    if not (math.isfinite(told) and math.isfinite(length)):
        raise DivergedError(
            f"stopped at {where}: the loss is {told} and the gradient's norm {length}; nothing was "
            f"saved; start again with a lower learning_rate (it is {config.learning_rate:g})"
        )
    if config.clip:
        clip_grads_with_norm_(gradients, config.clip, norm)
    return told, length


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """What `clearhead.optim.learning_rate` reads."""

    config: FinetuneConfig
    steps: int
    schedule: str = "cosine"
    final_learning_rate: float = 0.0

    @property
    def learning_rate(self) -> float:
        return self.config.learning_rate

    @property
    def warmup(self) -> float:
        return self.config.warmup

    def used(self, step: int) -> float:
        return step / self.steps
