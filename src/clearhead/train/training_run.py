"""A training run between its steps: how it is opened, its measures, its checkpoints, its end."""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer, learning_rate
from clearhead.records import provenance
from clearhead.records.files import write_json
from clearhead.records.lock import hold_folder
from clearhead.train import checkpoint, precision, run_dir
from clearhead.train.batches import BatchSource, check, keep_begin, objective_of
from clearhead.train.callbacks import (
    Callback,
    DivergedError,
    MetricsFile,
    Run,
    StepMetrics,
    TrainResult,
)
from clearhead.train.compiling import compiled
from clearhead.train.config import TrainConfig
from clearhead.train.interrupt import StopSignals
from clearhead.train.memory import PeakMemory
from clearhead.train.parallel import local, recompute, spread
from clearhead.train.trainable import choose_parameters
from clearhead.train.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The provenance of the process that began a run, and of those that resumed it, in run.json.
ORIGIN = (*provenance.KEYS, "processes")
# What a checkpoint records of run.json beside how far the run is.
_KEPT = ("seed", "processes", "config", "model", "data")


class TrainingRun:
    """State of a run in one process. Checkpoints hold its `step`, `seconds` and `loss`.

    Making it checks the arguments of `clearhead.train.train`, locks the run's folder until `stack`
    is closed, and restores the checkpoint that is resumed.
    """

    def __init__(
        self,
        stack: ExitStack,
        world: World,
        model: "PreTrainedModel",
        batches: BatchSource,
        config: TrainConfig,
        output: Path,
        tokenizer: "PreTrainedTokenizerBase | None",
        resume: bool,
        callbacks: Sequence[Callback],
        description: Mapping[str, Any],
    ) -> None:
        self.precision = precision.resolve(config.precision, model.device)
        self.config = config = replace(config, precision=self.precision)
        self.world, self.model, self.batches, self.tokenizer = world, model, batches, tokenizer
        self.objective = objective_of(batches)
        self.tokens_before = getattr(batches, "tokens_before", config.tokens_before)
        model.float()
        with world.together():
            choose_parameters(model, config)
            check(batches, model, config)
        keep_begin(batches, model)
        name = str(description.get("run", output.resolve().name))
        identity = run_dir.identity(model, batches, config)
        about = {**run_dir.describe(model, name, description), "seed": config.seed}
        record = {**about, **identity, "processes": world.size}
        world.agree({"versions": record["versions"], **identity})
        with world.together():
            self.spread = spread(model, batches, config, world)
            self.optimizer = build_optimizer(model, config)  # refuses before anything is written
        if config.checkpointing == "blocks":
            stack.callback(recompute, model, False)
        restarted = world.restarted()

        def hold() -> tuple[dict[str, Any] | None, Path | None]:
            """The record and folder of the checkpoint to go on from, in a folder that is held."""
            stack.enter_context(hold_folder(output))
            if resume or (restarted and run_dir.holds_run(output)):
                origin = {key: record[key] for key in ORIGIN if key in record}
                saved = run_dir.reopen(output, record, origin, config.steps)
                return saved, checkpoint.newest(output) if saved else None
            run_dir.require_no_run(output)
            write_json(output / run_dir.RUN_FILE, record)
            return None, None

        saved, newest = world.by_first(hold)
        with world.together():
            if not run_dir.holds_run(output):
                raise ClearheadError(
                    f"{output} is not the same folder for every process: choose one on a file "
                    "system that all machines share"
                )
        done = saved or {"step": 0, "seconds": 0.0, "loss": math.nan}
        self.step: int = done["step"]
        self.seconds: float = done["seconds"]
        self.loss: float = done["loss"]
        # Every process has a dropout of its own.
        torch.manual_seed((config.seed + 1_000_003 * world.rank + 7_919 * self.step) % 2**63)
        if newest is not None:
            checkpoint.restore(newest, model, self.optimizer, world)
        self.report = Run(
            name=name,
            output=output,
            model=model,
            steps=config.steps,
            first_step=self.step,
            record=record,
        )
        self.callbacks = [MetricsFile(), *callbacks] if world.first else []
        for callback in self.callbacks:
            stack.callback(callback.close)
            callback.start(self.report)
        stack.enter_context(compiled(model, config.compile))
        self.stop = stack.enter_context(StopSignals())
        self.stopped_by: signal.Signals | None = None
        self.memory = PeakMemory(model.device)
        self.saved_step = self.step
        self.gradient_norm = math.nan
        self.waited = 0.0
        self.first = self.logged = (self.step, self.seconds)

    def micro_batches(self) -> list[dict[str, torch.Tensor]]:
        """This process's part of the next step; the time that it takes is counted as waiting."""
        started = time.perf_counter()
        numbers = range(self.config.starts[self.step], self.config.starts[self.step + 1])
        parts = self.spread.micro_batches(self.batches, numbers)
        self.waited += time.perf_counter() - started
        return parts

    def finite(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
        """The loss over all processes, from this process's part, and the gradient norm, as floats.

        The only wait for the device in a step. It precedes the update, so that the DivergedError
        for values that are not finite leaves the weights intact.
        """
        own, total_norm = torch.stack([loss, norm]).tolist()
        losses = self.world.gather(own)
        total = sum(losses)
        if not math.isfinite(total):
            ranks = [str(rank) for rank, part in enumerate(losses) if not math.isfinite(part)]
            where = f" in process {', '.join(ranks)}" * (len(ranks) < len(losses))
            raise self.diverged(self.step + 1, f"the loss is {total}{where}")
        if not math.isfinite(total_norm):
            raise self.diverged(self.step + 1, f"the gradient's norm is {total_norm}")
        return total, total_norm

    def log_if_due(self) -> None:
        """Call the callbacks' `step`, every `log_every` steps and at the end."""
        config = self.config
        if self.step % config.log_every and self.step != config.steps:
            return
        (first_step, first_seconds), (logged_step, logged_seconds) = self.first, self.logged
        pace = (self.seconds - first_seconds) / (self.step - first_step)
        tokens, seconds = self.tokens_before(self.step), self.seconds - logged_seconds
        metrics = StepMetrics(
            step=self.step,
            tokens=tokens,
            seconds=self.seconds,
            loss=self.loss,
            learning_rate=learning_rate(self.step - 1, config),
            gradient_norm=self.gradient_norm,
            tokens_per_second=(tokens - self.tokens_before(logged_step)) / seconds,
            batch_stall=self.waited / seconds,
            seconds_left=(config.steps - self.step) * pace,
        )
        for callback in self.callbacks:
            callback.step(metrics)
        self.logged, self.waited = (self.step, self.seconds), 0.0

    def save(self) -> None:
        """Save a checkpoint, unless this step has one, and tell the callbacks."""
        if self.step == self.saved_step:
            return
        parts = (local(parameter) for parameter in self.model.parameters())
        # aminmax() takes an eleventh of isfinite()'s time, and propagates NaN.
        ends = (torch.stack(torch.aminmax(part)) for part in parts if part.numel())
        finite = all(bool(two.isfinite().all()) for two in ends)
        if not all(self.world.gather(finite)):
            raise self.diverged(self.step, "some weights are no longer finite")
        progress = {"step": self.step, "seconds": self.seconds, "loss": self.loss}
        path = checkpoint.save(
            self.report.output,
            world=self.world,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            record=progress | {key: self.report.record[key] for key in _KEPT},
            keep=self.config.keep,
        )
        self.saved_step = self.step
        for callback in self.callbacks:
            callback.checkpoint(path)

    def hear_signals(self) -> None:
        """Set `stopped_by` once any process has received a signal."""
        if received := int(max(self.world.gather(self.stop.received or 0))):
            self.stopped_by = signal.Signals(received)

    def end(self) -> TrainResult:
        """Save the last step, and the final model of a run that did all its steps."""
        self.save()
        self.model.eval()
        finished = self.step == self.config.steps
        if finished:
            newest = checkpoint.newest(self.report.output)
            advice = f"the checkpoint {newest} is whole; make room and resume"
            target = self.report.output / run_dir.FINAL
            checkpoint.export(target, self.model, self.tokenizer, self.world, advice)
        tokens = self.tokens_before(self.step)
        result = TrainResult(
            model=self.model,
            steps=self.step,
            tokens=tokens,
            seconds=self.seconds,
            tokens_per_second=tokens / self.seconds,
            peak_memory_bytes=self.memory.bytes(),
            final_loss=self.loss,
            stop_signal=None if finished else self.stopped_by,
        )
        for callback in self.callbacks:
            callback.end(result)
        return result

    def diverged(self, step: int, what: str) -> DivergedError:
        """The error for a value `what` that is not finite at `step`, counted from 1."""
        last = checkpoint.newest(self.report.output)
        finite = "no step before it was finite"
        if math.isfinite(self.loss):
            finite = f"the last finite loss was {self.loss:.4f}"
        where = f"the last good checkpoint is {last}" if last else "no checkpoint was saved yet"
        error = DivergedError(
            f"stopped at step {step}: {what}; {finite}; {where}; start another run with a lower "
            f"learning_rate (it is {self.config.learning_rate:g}) or a longer warmup "
            f"(it is {self.config.warmup:g})"
        )
        error.printed_elsewhere = not self.world.first
        return error
