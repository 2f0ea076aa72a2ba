"""The training loop, and the state of a run between its steps."""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.errors import ClearheadError
from clearhead.models.configuration import WINDOW_BEGIN
from clearhead.models.loading import pretrained
from clearhead.nn.annealing import advance
from clearhead.optim import build_optimizer, learning_rate
from clearhead.optim.orthoadam import local
from clearhead.records.files import hold_folder, write_json
from clearhead.records.manifest import verify_model
from clearhead.settings.train import TrainConfig
from clearhead.train import checkpoint, precision, run_dir
from clearhead.train.callbacks import (
    Callback,
    DivergedError,
    InterruptedRun,
    MetricsFile,
    Run,
    StepMetrics,
    TrainResult,
)
from clearhead.train.compiling import compiled
from clearhead.train.interrupt import StopSignals
from clearhead.train.memory import PeakMemory
from clearhead.train.parallel import (
    BatchSource,
    accumulate,
    check,
    dealt_among,
    is_sharded,
    objective_of,
    own_part,
    recompute,
    spread,
    whole,
)
from clearhead.train.trainable import choose_parameters
from clearhead.train.world import World, joined

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Keys of run.json that a checkpoint records beside its progress.
_KEPT = ("seed", "processes", "config", "model", "data")


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
    """Train `model` in place, on the device it is on and in float32, in the run folder `output`.

    Step s uses the batches from config.starts[s] to before config.starts[s + 1]. PyTorch's
    generators are seeded with `config.seed`. SIGINT, SIGTERM and SIGHUP stop the run after the
    current step, with a checkpoint.

    Under torchrun the processes share every step and write one folder, the same tokens in the same
    order however many they are; each calls this function with the same arguments. Callbacks are
    called in the first process only. After a restart by torchrun the run is resumed.

    Args:
        model: any Hugging Face causal language model; a masked one or a classifier with such
            batches. To resume it must be built as it was for the run.
        batches: see `BatchSource`.
        config: the settings; "auto" is resolved, and recorded as resolved.
        output: must hold no run, or with `resume` the run to continue. A finished one is extended
            by more tokens under its own schedule_tokens.
        tokenizer: saved with every checkpoint.
        resume: continue from the newest checkpoint.
        callbacks: called at every step; metrics.jsonl is written in any case.
        description: JSON values for run.json; its "run" names the run in the records.

    Raises:
        ClearheadError: for settings that do not fit the model, the batches or the run resumed; for
            a damaged checkpoint; for a full disk. Checkpoints written before stay.
        DivergedError (a ClearheadError): for a loss, a gradient or weights that are not finite.
    """
    with joined(config.timeout, alone=config.parallel != "fsdp") as world, ExitStack() as stack:
        run = _Training(
            stack,
            world,
            model,
            batches,
            config,
            output=Path(output),
            tokenizer=tokenizer,
            resume=resume,
            callbacks=callbacks,
            description=description or {},
        )
        config = run.config
        model.train()
        advance(model, config.done(run.step))
        received = 0  # a signal, by any process
        while run.step < config.steps and not received:
            started = time.perf_counter()
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.step, config)
            run.optimizer.zero_grad(set_to_none=True)
            parts = run.micro_batches()
            loss = accumulate(model, parts, run.precision, run.objective, run.forward, world)
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = whole(get_total_norm([p.grad for p in parameters]))
            run.loss, run.gradient_norm = run.finite(loss, norm)
            if config.clip:
                clip_grads_with_norm_(parameters, config.clip, norm)
            advance(model, config.done(run.step + 1))
            run.optimizer.step()
            run.seconds += time.perf_counter() - started
            run.step += 1
            if run.step % config.log_every == 0 or run.step == config.steps:
                run.log()
            if run.step % (config.save_every or config.steps) == 0:
                run.save()
            received = max(world.gather(run.stop.received or 0))
        return run.end(signal.Signals(received) if received else None)


def train_to_end(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    *,
    output: Path,
    **options: Any,
) -> "tuple[PreTrainedModel, TrainResult | None]":
    """Begin the run in `output`, resume it, or load its finished model; `options` as in `train`.

    Returns:
        The trained model in evaluation mode; and the result, None if the run was already
        finished.

    Raises:
        ClearheadError: as `train`; for a finished run of other settings, or whose model is damaged.
        InterruptedRun: after SIGINT, SIGTERM or SIGHUP, once the run has saved.
    """
    final, kind, device = output / run_dir.FINAL, type(model), model.device
    with joined(config.timeout, alone=config.parallel != "fsdp") as world:
        if world.by_first(lambda: run_dir.is_finished(output)):
            config = replace(config, precision=precision.resolve(config.precision, device))
            identity = run_dir.comparable(run_dir.identity(model, batches, config))
            run_dir.refuse_changes(
                output, run_dir.comparable(run_dir.read_record(output)), identity
            )
            verify_model(final)
            return pretrained(kind, final).to(device), None
        resume = world.by_first(lambda: run_dir.holds_run(output))
        result = train(model, batches, config, output=output, resume=resume, **options)
        if result.stop_signal is not None:
            raise InterruptedRun(result.stop_signal)
        if is_sharded(result.model):  # no process can run it alone
            return pretrained(kind, final).to(device), result
        return result.model, result


class _Training:
    """State of a run in one process. The constructor checks the arguments of `train`, locks the
    run's folder until `stack` is closed, and restores the checkpoint that is resumed."""

    def __init__(
        self,
        stack: ExitStack,
        world: World,
        model: "PreTrainedModel",
        batches: BatchSource,
        config: TrainConfig,
        *,
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
        # Measurements open windows as the training did; an earlier training's token goes.
        if hasattr(batches, "begin"):
            vars(model.config).pop(WINDOW_BEGIN, None)
            if batches.begin is not None:
                setattr(model.config, WINDOW_BEGIN, batches.begin)
        name = str(description.get("run", output.resolve().name))
        identity = run_dir.identity(model, batches, config)
        about = {**run_dir.describe(model, name, description), "seed": config.seed}
        record = {**about, **identity, "processes": world.size}
        world.agree({"versions": record["versions"], **identity})
        with world.together():
            self.forward = spread(model, batches, config, world)
            self.optimizer = build_optimizer(model, config)  # refuses before anything is written
        if config.checkpointing == "blocks":
            stack.callback(recompute, model, False)
        restarted = world.restarted()

        def hold() -> dict[str, Any] | None:
            """Lock the run's folder; the record of the checkpoint to go on from."""
            stack.enter_context(hold_folder(output))
            if resume or (restarted and run_dir.holds_run(output)):
                return run_dir.reopen(output, record, config.steps)
            run_dir.require_no_run(output)
            write_json(output / run_dir.RUN_FILE, record)
            return None

        saved = world.by_first(hold)
        with world.together():
            if not run_dir.holds_run(output):
                raise ClearheadError(f"all processes must share {output}, on one file system")
        done = saved or {"step": 0, "seconds": 0.0, "loss": math.nan}
        self.step: int = done["step"]
        self.seconds: float = done["seconds"]
        self.loss: float = done["loss"]
        # Every process has a dropout of its own.
        torch.manual_seed((config.seed + 1_000_003 * world.rank + 7_919 * self.step) % 2**63)
        newest = checkpoint.newest(output) if saved else None
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
        self.memory = PeakMemory(model.device)
        self.saved_step = self.step
        self.gradient_norm = math.nan
        self.waited = 0.0
        self.first = self.logged = (self.step, self.seconds)
        self.dealt = dealt_among(config, world.size)

    def micro_batches(self) -> list[dict[str, torch.Tensor]]:
        """This process's part of the next step; the time that it takes is counted as waiting."""
        started = time.perf_counter()
        numbers = range(self.config.starts[self.step], self.config.starts[self.step + 1])
        parts = own_part(self.batches, numbers, self.world, self.dealt)
        self.waited += time.perf_counter() - started
        return parts

    def finite(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
        """The loss over all processes, from this process's part, and the gradient norm, as floats:
        the step's only wait for the device. A DivergedError leaves the weights as they were."""
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

    def log(self) -> None:
        """Call the callbacks' `step`."""
        (first_step, first_seconds), (logged_step, logged_seconds) = self.first, self.logged
        pace = (self.seconds - first_seconds) / (self.step - first_step)
        tokens, seconds = self.tokens_before(self.step), self.seconds - logged_seconds
        metrics = StepMetrics(
            step=self.step,
            tokens=tokens,
            seconds=self.seconds,
            loss=self.loss,
            learning_rate=learning_rate(self.step - 1, self.config),
            gradient_norm=self.gradient_norm,
            tokens_per_second=(tokens - self.tokens_before(logged_step)) / seconds,
            batch_stall=self.waited / seconds,
            seconds_left=(self.config.steps - self.step) * pace,
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

    def end(self, received: signal.Signals | None) -> TrainResult:
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
            stop_signal=None if finished else received,
        )
        for callback in self.callbacks:
            callback.end(result)
        return result

    def diverged(self, step: int, what: str) -> ClearheadError:
        """The error for a value `what` that is not finite at `step`, counted from 1."""
        last, config = checkpoint.newest(self.report.output), self.config
        loss = f"{self.loss:.4f}" if math.isfinite(self.loss) else "none"
        return self.world.for_all(
            DivergedError(
                f"stopped at step {step}: {what}; the last finite loss was {loss}; the last good "
                f"checkpoint is {last or 'none'}; start another run with a lower learning_rate (it "
                f"is {config.learning_rate:g}) or a longer warmup (it is {config.warmup:g})"
            )
        )
