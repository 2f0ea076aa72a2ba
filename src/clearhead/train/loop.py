"""The training loop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grads_with_norm_, get_total_norm

<<<<<<< HEAD
from clearhead.errors import ClearheadError
from clearhead.nn.annealing import advance
from clearhead.optim import build_optimizer, learning_rate
from clearhead.records import provenance
from clearhead.records.lock import Lock, hold_folder
from clearhead.train import checkpoint, precision, run_dir, world
from clearhead.train.batches import BatchSource, check, keep_begin, objective_of
from clearhead.train.callbacks import Callback, MetricsFile, Run, StepMetrics
from clearhead.train.compiling import compiled
=======
from clearhead.nn.annealing import advance
from clearhead.optim import learning_rate
from clearhead.train import world
from clearhead.train.batches import BatchSource
from clearhead.train.callbacks import Callback
>>>>>>> h-loop
from clearhead.train.config import TrainConfig
from clearhead.train.parallel import accumulate, whole
from clearhead.train.result import TrainResult
from clearhead.train.training_run import TrainingRun, opened

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
    generators are seeded with `config.seed`; weights that are not float32 become so. SIGINT,
    SIGTERM and SIGHUP stop the run after the step at hand, with a checkpoint.

    Under torchrun the processes share every step and write one folder, the same tokens in the same
    order however many they are; each calls this function with the same arguments. Callbacks hear
    of the run in the first process only. After a restart by torchrun the run is resumed.

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
<<<<<<< HEAD
    with world.joined(config.timeout, alone=config.parallel != "fsdp") as joined:
        return _train(
            model, batches, config, joined, Path(output), tokenizer, resume, callbacks, description
        )


def _train(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    joined: World,
    output: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    resume: bool,
    callbacks: Sequence[Callback],
    description: Mapping[str, Any] | None,
) -> TrainResult:
    config = replace(config, precision=precision.resolve(config.precision, model.device))
    model.float()
    with joined.alike():
        choose_parameters(model, config)
        check(batches, model, config)
    keep_begin(batches, model)
    description = description or {}
    name = str(description.get("run", output.resolve().name))
    identity = run_dir.identity(model, batches, config)
    record = {**run_dir.describe(model, name, description), "seed": config.seed, **identity}
    record["processes"] = joined.size
    joined.agree({"versions": record["versions"], **identity})
    with joined.alike():
        model_spread = spread(model, batches, config, joined)
        optimizer = build_optimizer(model, config)  # refuses before anything is written
    with ExitStack() as stack:
        locks = list[Lock]()  # of the first process
        restarted = joined.restarted()

        def opened() -> tuple[dict[str, Any] | None, Path | None]:
            """The record and folder of the checkpoint to go on from, in a folder that is held."""
            locks.append(stack.enter_context(hold_folder(output)))
            if resume or (restarted and run_dir.holds_run(output)):
                origin = {key: record[key] for key in ORIGIN if key in record}
                saved = run_dir.reopen(output, record, origin, config.steps)
                return saved, None if saved is None else checkpoint.newest(output)
            run_dir.begin(output, record)
            return None, None

        saved, newest = joined.by_first(opened)
        if not all(joined.gather(run_dir.holds_run(output))):
            raise joined.told(
                ClearheadError(
                    f"{output} is not the same folder for every process: choose one on a file "
                    "system that all machines share"
                )
            )
        _seed(config.seed, joined, saved["step"] if saved else 0)
        if saved is not None and newest is not None:
            checkpoint.restore(newest, model, optimizer, joined)
        progress = _Progress.resumed(saved)
        run = Run(
            name=name,
            output=output,
            model=model,
            steps=config.steps,
            first_step=progress.step,
            record=record,
        )

        def prepare(step: int) -> MicroBatches:
            numbers = range(config.starts[step], config.starts[step + 1])
            return model_spread.micro_batches(batches, numbers)

        steps = range(progress.step, config.steps)
        loop = _Loop(
            prefetcher=stack.enter_context(Prefetcher(prepare, steps, model.device)),
            run=run,
            locks=locks,
            spread=model_spread,
            model=model,
=======
    with (
        world.joined(config.timeout, alone=config.parallel != "fsdp") as processes,
        opened(
            model,
            batches,
            config,
            processes,
            output=Path(output),
>>>>>>> h-loop
            tokenizer=tokenizer,
            resume=resume,
            callbacks=callbacks,
            description=description or {},
        ) as run,
    ):
        return steps(run)


<<<<<<< HEAD
def _seed(seed: int, joined: World, step: int = 0) -> None:
    """Seed PyTorch's generators, so that every process has a dropout of its own."""
    torch.manual_seed((seed + 1_000_003 * joined.rank + 7_919 * step) % 2**63)


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

    prefetcher: Prefetcher
    run: Run
    locks: Sequence[Lock]
    spread: Spread
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    batches: BatchSource
    config: TrainConfig
    optimizer: torch.optim.Optimizer
    identity: dict[str, Any]
    progress: _Progress
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self.world = self.spread.world
        self.precision = precision.resolve(self.config.precision, self.model.device)
        self.saved_step = self.progress.step
        self.saver = Saver(self.world)
        self.memory = PeakMemory(self.model.device)

    def run_steps(self, stop: StopSignals, alive: Callable[[], None]) -> TrainResult:
        """Do the steps that remain, or those until any process has a signal; save; sum up."""
        config, progress = self.config, self.progress
        stopped = None
        before = _Mark(progress.step, progress.seconds, self.prefetcher.waited)
        logged = before
        every = config.save_every or config.steps
        saves_before_end = (config.steps - 1) // every > progress.step // every
        self.model.train()
        while progress.step < config.steps:
            alive()
            started = time.perf_counter()
            norm = self.step()
            progress.step += 1
            progress.seconds += time.perf_counter() - started
            if progress.step % config.log_every == 0 or progress.step == config.steps:
                self.log(norm, before, logged)
                logged = _Mark(progress.step, progress.seconds, self.prefetcher.waited)
            self.tell_published()
            if progress.step % every == 0:
                self.save(last=progress.step == config.steps)
            elif saves_before_end and progress.step == self.run.first_step + 1:
                checkpoint.prepare(self.model, self.optimizer, self.saver)
            received = int(max(self.world.gather(stop.received or 0)))
            if received:
                stopped = signal.Signals(received)
                break
        self.save(last=True)
        self.saver.finish()
        self.tell_published()
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
            stop_signal=None if finished else stopped,
        )

    def step(self) -> float:
        """One optimizer step; returns the gradient's norm before clipping."""
        config, step = self.config, self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        micro_batches = self.prefetcher.take()
        self.optimizer.zero_grad(set_to_none=True)
        objective = objective_of(self.batches)
        total = accumulate(self.model, micro_batches, self.precision, objective, self.spread)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total_norm = whole(get_total_norm([p.grad for p in parameters]))
        # One wait for the device, and before the update: what is not finite never gets in.
        own, norm = torch.stack([total, total_norm]).tolist()
        losses = self.world.gather(own)
        loss = sum(losses)
        if not math.isfinite(loss):
            ranks = [str(rank) for rank, one in enumerate(losses) if not math.isfinite(one)]
            of = f" in process {', '.join(ranks)}" * (len(ranks) < len(losses))
            raise self.diverged(step + 1, f"the loss is {loss}{of}")
        if not math.isfinite(norm):
            raise self.diverged(step + 1, f"the gradient's norm is {norm}")
        if config.clip:
            clip_grads_with_norm_(parameters, config.clip, total_norm)
        advance(self.model, config.done(step + 1))
        self.optimizer.step()
        self.progress.loss = loss
        return norm

    def log(self, norm: float, before: "_Mark", logged: "_Mark") -> None:
        """Tell the callbacks about the step just done."""
        config, progress = self.config, self.progress
        pace = (progress.seconds - before.seconds) / (progress.step - before.step)
        tokens = config.tokens_before(progress.step) - config.tokens_before(logged.step)
        seconds = progress.seconds - logged.seconds
        metrics = StepMetrics(
            step=progress.step,
            tokens=config.tokens_before(progress.step),
            seconds=progress.seconds,
            loss=progress.loss,
            learning_rate=learning_rate(progress.step - 1, config),
            gradient_norm=norm,
            tokens_per_second=tokens / seconds,
            batch_stall=(self.prefetcher.waited - logged.waited) / seconds,
            seconds_left=(config.steps - progress.step) * pace,
        )
        for callback in self.callbacks:
            callback.step(metrics)

    def save(self, *, last: bool) -> None:
        """Begin a checkpoint, unless this step has one; with the `last` no step goes on beside."""
        progress = self.progress
        if progress.step == self.saved_step:
            return
        self.saver.finish()
        self.tell_published()
        parts = (local(parameter) for parameter in self.model.parameters())
        # An eleventh of what isfinite() takes; not a number is propagated.
        ends = (torch.stack(torch.aminmax(part)) for part in parts if part.numel())
        finite = all(bool(two.isfinite().all()) for two in ends)
        if not all(self.world.gather(finite)):
            raise self.diverged(progress.step, "some weights are no longer finite")
        self.world.by_first(self.check_locks)
        checkpoint.save(
            self.run.output,
            saver=self.saver,
            last=last,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            record={
                "step": progress.step,
                "seconds": progress.seconds,
                "loss": progress.loss,
                "seed": self.config.seed,
                "processes": self.world.size,
                **self.identity,
            },
            keep=self.config.keep,
        )
        self.saved_step = progress.step

    def tell_published(self) -> None:
        """Tell the callbacks about a checkpoint that is whole now."""
        if path := self.saver.published():
            for callback in self.callbacks:
                callback.checkpoint(path)

    def save_final(self) -> None:
        """Publish the folder that marks the run as finished."""
        self.world.by_first(self.check_locks)
        newest = checkpoint.newest(self.run.output)
        advice = f"the checkpoint {newest} is whole; make room and resume"
        target = self.run.output / run_dir.FINAL
        checkpoint.export(target, self.model, self.tokenizer, self.world, advice)

    def check_locks(self) -> None:
        """Raise a ClearheadError where the run's folder is gone."""
        for lock in self.locks:
            lock.check()

    def diverged(self, step: int, what: str) -> DivergedError:
        """The error of a run that left the finite numbers at `step`, counted from 1."""
        with suppress(ClearheadError):  # a full disk is not what stopped the run
            self.saver.finish()
        last = checkpoint.newest(self.run.output)
        finite = "no step before it was finite"
        if math.isfinite(self.progress.loss):
            finite = f"the last finite loss was {self.progress.loss:.4f}"
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved yet"
        error = DivergedError(
            f"stopped at step {step}: {what}; {finite}; {kept}; start another run with a lower "
            f"learning_rate (it is {self.config.learning_rate:g}) or a longer warmup "
            f"(it is {self.config.warmup:g})"
        )
        error.printed_elsewhere = not self.world.first
        return error


@dataclass(frozen=True)
class _Mark:
    """A step, the time it was reached, and how much of it was waiting for batches."""

    step: int
    seconds: float
    waited: float
=======
def steps(run: TrainingRun) -> TrainResult:
    """Do the steps that remain, or those until any process has a signal."""
    model, optimizer, config = run.model, run.optimizer, run.config
    model.train()
    while run.step < config.steps:
        with run.timed():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.step, config)
            micro_batches = run.micro_batches.take()
            optimizer.zero_grad(set_to_none=True)
            loss = accumulate(model, micro_batches, run.precision, run.objective, run.spread)
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = whole(get_total_norm([p.grad for p in parameters]))
            run.loss, run.gradient_norm = run.finite(loss, norm)
            if config.clip:
                clip_grads_with_norm_(parameters, config.clip, norm)
            advance(model, config.done(run.step + 1), run.loss)
            optimizer.step()
        run.step += 1
        run.log_if_due()
        run.save_if_due()
        if run.must_stop():
            break
    return run.end()
>>>>>>> h-loop
