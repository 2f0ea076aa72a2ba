"""The training loop."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer, learning_rate
from clearhead.records import manifest, provenance
from clearhead.records.files import publish_folder
from clearhead.records.lock import Lock, hold_folder
from clearhead.train import adapters, checkpoint, folder, precision
from clearhead.train.batches import (
    NEXT_TOKEN,
    BatchSource,
    check,
    forward_parameters,
    label_count,
    objective_of,
)
from clearhead.train.callbacks import Callback, MetricsFile, Run, StepMetrics
from clearhead.train.compiling import compiled
from clearhead.train.config import TrainConfig
from clearhead.train.interrupt import StopSignals
from clearhead.train.memory import PeakMemory
from clearhead.train.result import DivergedError, TrainResult
from clearhead.train.trainable import choose_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    *,
    output: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    description: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train `model` in place, on the device it is on, and keep the run in the folder `output`.

    Step s uses the batches from config.starts[s] to before config.starts[s + 1]. PyTorch's
    generators are seeded with `config.seed`; weights that are not float32 become so. SIGINT and
    SIGTERM stop the run after the step at hand, with a checkpoint.

    Args:
        model: any Hugging Face causal language model; a masked one or a classifier with such
            batches.
        batches: see `BatchSource`.
        config: the settings; "auto" is resolved, and recorded as resolved.
        output: the run folder; it must hold no run, or with `resume` the run to go on with. A
            finished one is extended by more tokens under its own schedule_tokens.
        tokenizer: saved with every checkpoint.
        resume: go on from the newest checkpoint. `model` must be built as it was for the run.
        callbacks: told of every step; metrics.jsonl is written without any.
        description: JSON values for run.json; its "run" names the run in the records.

    Raises:
        ClearheadError: for settings that do not fit the model, the batches or the run resumed; for
            a damaged checkpoint; for a full disk. Checkpoints written before stay.
        DivergedError: one of them, for a loss, a gradient or weights that are not finite.
    """
    output = Path(output)
    config = replace(config, precision=precision.resolve(config.precision, model.device))
    model.float()
    choose_parameters(model, config)
    check(batches, model, config)
    description = description or {}
    name = str(description.get("run", output.resolve().name))
    identity = folder.identity(model, batches, config)
    record = {**folder.describe(model, name, description), "seed": config.seed, **identity}
    optimizer = build_optimizer(model, config)  # refuses what it must before anything is written
    with ExitStack() as stack:
        lock = stack.enter_context(hold_folder(output))
        saved = None
        if resume:
            origin = {key: record[key] for key in provenance.KEYS if key in record}
            saved = folder.reopen(output, record, origin, config.steps)
        else:
            folder.begin(output, record)
        torch.manual_seed(config.seed)
        if saved is not None and (newest := checkpoint.newest(output)):
            checkpoint.restore(newest, model, optimizer)
        progress = _Progress.resumed(saved)
        run = Run(
            name=name,
            output=output,
            model=model,
            steps=config.steps,
            first_step=progress.step,
            record=record,
        )
        loop = _Loop(
            run=run,
            lock=lock,
            model=model,
            tokenizer=tokenizer,
            batches=batches,
            config=config,
            optimizer=optimizer,
            identity=identity,
            progress=progress,
            callbacks=[MetricsFile(), *callbacks],
        )
        for callback in loop.callbacks:
            stack.callback(callback.close)
            callback.start(run)
        stack.enter_context(compiled(model, config.compile))
        stop = stack.enter_context(StopSignals())
        result = loop.run_steps(stop)
        for callback in loop.callbacks:
            callback.end(result)
    return result


def accumulate(
    model: "PreTrainedModel",
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
    mode: precision.Resolved,
    objective: str = NEXT_TOKEN,
) -> torch.Tensor:
    """Add the gradients of one step's micro-batches to the parameters; return the step's loss.

    The loss is that of one batch holding them all: the sum over label tokens, divided by their
    number. Each model's mean is weighted by its share of the labels, which differ where masks
    leave some out; this asks nothing of the model beyond a mean loss, whereas an argument such as
    `num_items_in_batch` is swallowed unread by some.

    Raises:
        ClearheadError: where no micro-batch has a label.
    """
    counts = [label_count(dict(batch), objective) for batch in micro_batches]
    if not any(counts):
        raise ClearheadError("a step has no label to learn from: give longer documents or batches")
    device = model.device
    extra = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}
    total = torch.zeros((), device=device)
    for batch, count in zip(micro_batches, counts, strict=True):
        if count == 0:
            continue  # its mean would be 0 / 0
        inputs = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        with precision.autocast(mode, device):
            loss = model(**inputs, **extra).loss * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    return total


@dataclass
class _Progress:
    """Progress of a run: what a checkpoint's trainer.json holds beside the settings."""

    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan

    @classmethod
    def resumed(cls, saved: Mapping[str, Any] | None) -> "_Progress":
        if saved is None:
            return cls()
        return cls(step=saved["step"], seconds=saved["seconds"], loss=saved["loss"])


@dataclass
class _Loop:
    """The steps of one process's part of a run."""

    run: Run
    lock: Lock
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    batches: BatchSource
    config: TrainConfig
    optimizer: torch.optim.Optimizer
    identity: dict[str, Any]
    progress: _Progress
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self.precision = precision.resolve(self.config.precision, self.model.device)
        self.saved_step = self.progress.step
        self.memory = PeakMemory(self.model.device)
        # Parts of a model that change with training beside its weights; buffers hold what they are.
        self.followers = [m for m in self.model.modules() if hasattr(m, "on_step_end")]

    def run_steps(self, stop: StopSignals) -> TrainResult:
        """Do the steps that remain, or those until a signal; save; sum up."""
        config, progress = self.config, self.progress
        before = _Mark(progress.step, progress.seconds)
        logged = before
        self.model.train()
        while progress.step < config.steps:
            started = time.perf_counter()
            norm = self.step()
            progress.step += 1
            for module in self.followers:
                module.on_step_end(config.done(progress.step), progress.loss)
            progress.seconds += time.perf_counter() - started
            if progress.step % config.log_every == 0 or progress.step == config.steps:
                self.log(norm, before, logged)
                logged = _Mark(progress.step, progress.seconds)
            if config.save_every and progress.step % config.save_every == 0:
                self.save()
            if stop.received is not None:
                break
        self.save()
        self.model.eval()
        finished = progress.step == config.steps
        if finished:
            self.save_final()
        tokens = config.tokens_before(progress.step)
        return TrainResult(
            model=self.model,
            steps=progress.step,
            tokens=tokens,
            seconds=progress.seconds,
            tokens_per_second=tokens / progress.seconds,
            peak_memory_bytes=self.memory.bytes(),
            final_loss=progress.loss,
            stop_signal=None if finished else stop.received,
        )

    def step(self) -> float:
        """One optimizer step; returns the gradient's norm before clipping."""
        config, step = self.config, self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        numbers = range(config.starts[step], config.starts[step + 1])
        micro_batches = [self.batches.batch(number) for number in numbers]
        self.optimizer.zero_grad(set_to_none=True)
        objective = objective_of(self.batches)
        total = accumulate(self.model, micro_batches, self.precision, objective)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total_norm = get_total_norm([p.grad for p in parameters])
        # One wait for the device, and before the update: what is not finite never gets in.
        loss, norm = torch.stack([total, total_norm]).tolist()
        if not math.isfinite(loss):
            raise self.diverged(step + 1, f"the loss is {loss}")
        if not math.isfinite(norm):
            raise self.diverged(step + 1, f"the gradient's norm is {norm}")
        if config.clip:
            clip_grads_with_norm_(parameters, config.clip, total_norm)
        self.optimizer.step()
        self.progress.loss = loss
        return norm

    def log(self, norm: float, before: "_Mark", logged: "_Mark") -> None:
        """Tell the callbacks about the step just done."""
        config, progress = self.config, self.progress
        pace = (progress.seconds - before.seconds) / (progress.step - before.step)
        tokens = config.tokens_before(progress.step) - config.tokens_before(logged.step)
        metrics = StepMetrics(
            step=progress.step,
            tokens=config.tokens_before(progress.step),
            seconds=progress.seconds,
            loss=progress.loss,
            learning_rate=learning_rate(progress.step - 1, config),
            gradient_norm=norm,
            tokens_per_second=tokens / (progress.seconds - logged.seconds),
            seconds_left=(config.steps - progress.step) * pace,
        )
        for callback in self.callbacks:
            callback.step(metrics)

    def save(self) -> None:
        """Publish a checkpoint, unless this step has one."""
        progress = self.progress
        if progress.step == self.saved_step:
            return
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise self.diverged(progress.step, "some weights are no longer finite")
        self.lock.check()
        path = checkpoint.save(
            self.run.output,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            record={
                "step": progress.step,
                "seconds": progress.seconds,
                "loss": progress.loss,
                "seed": self.config.seed,
                **self.identity,
            },
            keep=self.config.keep,
        )
        self.saved_step = progress.step
        for callback in self.callbacks:
            callback.checkpoint(path)

    def save_final(self) -> None:
        """Publish the folder that marks the run as finished."""
        self.lock.check()
        newest = checkpoint.newest(self.run.output)
        advice = f"the checkpoint {newest} is whole; make room and resume"
        with publish_folder(self.run.output / folder.FINAL, advice) as temporary:
            adapters.merge(self.model, temporary / adapters.FOLDER)
            checkpoint.save_pretrained(self.model, self.tokenizer, temporary)
            manifest.seal(temporary)

    def diverged(self, step: int, what: str) -> DivergedError:
        """The error of a run that left the finite numbers at `step`, counted from 1."""
        last = checkpoint.newest(self.run.output)
        finite = "no step before it was finite"
        if math.isfinite(self.progress.loss):
            finite = f"the last finite loss was {self.progress.loss:.4f}"
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved yet"
        return DivergedError(
            f"stopped at step {step}: {what}; {finite}; {kept}; start another run with a lower "
            f"learning_rate (it is {self.config.learning_rate:g}) or a longer warmup "
            f"(it is {self.config.warmup:g})"
        )


@dataclass(frozen=True)
class _Mark:
    """A step and the time it was reached."""

    step: int
    seconds: float
