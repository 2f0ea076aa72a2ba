"""A training run between its steps: model and optimizer, progress, checkpoints."""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer, learning_rate
from clearhead.records import provenance
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
from clearhead.train.parallel import Spread, local, recompute, spread
from clearhead.train.trainable import choose_parameters
from clearhead.train.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The provenance of the process that began a run, and of those that resumed it, in run.json.
ORIGIN = (*provenance.KEYS, "processes")


@dataclass
class TrainingRun:
    """State of a run in one process. Checkpoints hold its `step`, `seconds` and `loss`."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    batches: BatchSource
    spread: Spread
    report: Run
    identity: dict[str, Any]
    """Everything that a resumed run must share with this one."""
    callbacks: Sequence[Callback]
    stop: StopSignals
    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    gradient_norm: float = math.nan
    stopped_by: signal.Signals | None = None

    def __post_init__(self) -> None:
        self.world = self.spread.world
        self.objective = objective_of(self.batches)
        self.tokens_before = getattr(self.batches, "tokens_before", self.config.tokens_before)
        self.precision = precision.resolve(self.config.precision, self.model.device)
        self.memory = PeakMemory(self.model.device)
        self.saved_step = self.first_step = self.logged_step = self.step
        self.first_seconds = self.logged_seconds = self.seconds
        self.waited = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of a step."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

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
        pace = (self.seconds - self.first_seconds) / (self.step - self.first_step)
        tokens = self.tokens_before(self.step)
        seconds = self.seconds - self.logged_seconds
        metrics = StepMetrics(
            step=self.step,
            tokens=tokens,
            seconds=self.seconds,
            loss=self.loss,
            learning_rate=learning_rate(self.step - 1, config),
            gradient_norm=self.gradient_norm,
            tokens_per_second=(tokens - self.tokens_before(self.logged_step)) / seconds,
            batch_stall=self.waited / seconds,
            seconds_left=(config.steps - self.step) * pace,
        )
        for callback in self.callbacks:
            callback.step(metrics)
        self.logged_step, self.logged_seconds, self.waited = self.step, self.seconds, 0.0

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
        path = checkpoint.save(
            self.report.output,
            world=self.world,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            record={
                "step": self.step,
                "seconds": self.seconds,
                "loss": self.loss,
                "seed": self.config.seed,
                "processes": self.world.size,
                **self.identity,
            },
            keep=self.config.keep,
        )
        self.saved_step = self.step
        for callback in self.callbacks:
            callback.checkpoint(path)

    def must_stop(self) -> bool:
        """True once any process has received a signal."""
        received = int(max(self.world.gather(self.stop.received or 0)))
        self.stopped_by = signal.Signals(received) if received else None
        return self.stopped_by is not None

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


@contextmanager
def opened(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    processes: World,
    output: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    resume: bool,
    callbacks: Sequence[Callback],
    description: Mapping[str, Any],
) -> Iterator[TrainingRun]:
    """Check the arguments of `train`, lock the run's folder, and restore any checkpoint resumed."""
    config = replace(config, precision=precision.resolve(config.precision, model.device))
    model.float()
    with processes.together():
        choose_parameters(model, config)
        check(batches, model, config)
    keep_begin(batches, model)
    name = str(description.get("run", output.resolve().name))
    identity = run_dir.identity(model, batches, config)
    record = {**run_dir.describe(model, name, description), "seed": config.seed, **identity}
    record["processes"] = processes.size
    processes.agree({"versions": record["versions"], **identity})
    with processes.together():
        model_spread = spread(model, batches, config, processes)
        optimizer = build_optimizer(model, config)  # refuses before anything is written
    with ExitStack() as stack:
        restarted = processes.restarted()

        def hold() -> tuple[dict[str, Any] | None, Path | None]:
            """The record and folder of the checkpoint to go on from, in a folder that is held."""
            stack.enter_context(hold_folder(output))
            if resume or (restarted and run_dir.holds_run(output)):
                origin = {key: record[key] for key in ORIGIN if key in record}
                saved = run_dir.reopen(output, record, origin, config.steps)
                return saved, None if saved is None else checkpoint.newest(output)
            run_dir.begin(output, record)
            return None, None

        saved, newest = processes.by_first(hold)
        with processes.together():
            if not run_dir.holds_run(output):
                raise ClearheadError(
                    f"{output} is not the same folder for every process: choose one on a file "
                    "system that all machines share"
                )
        first_step = saved["step"] if saved else 0
        _seed(config.seed, processes, first_step)
        if saved is not None and newest is not None:
            checkpoint.restore(newest, model, optimizer, processes)

        report = Run(
            name=name,
            output=output,
            model=model,
            steps=config.steps,
            first_step=first_step,
            record=record,
        )
        heard = [MetricsFile(), *callbacks] if processes.first else []
        for callback in heard:
            stack.callback(callback.close)
            callback.start(report)
        stack.enter_context(compiled(model, config.compile))
        yield TrainingRun(
            model=model,
            tokenizer=tokenizer,
            optimizer=optimizer,
            config=config,
            batches=batches,
            spread=model_spread,
            report=report,
            identity=identity,
            callbacks=heard,
            stop=stack.enter_context(StopSignals()),
            **({key: saved[key] for key in ("step", "seconds", "loss")} if saved else {}),
        )
    if config.checkpointing == "blocks":
        recompute(model, False)


def _seed(seed: int, processes: World, step: int = 0) -> None:
    """Seed PyTorch's generators, so that every process has a dropout of its own."""
    torch.manual_seed((seed + 1_000_003 * processes.rank + 7_919 * step) % 2**63)
