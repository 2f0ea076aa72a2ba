"""Reports of a run: callbacks (metrics, progress, TensorBoard, W&B), its result and errors."""

import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clearhead.errors import ClearheadError, Stopped, require
from clearhead.progress import Line, Work, in_words
from clearhead.records import jsonl
from clearhead.records.files import write_text, writing
from clearhead.settings.train import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS = "metrics.jsonl"
LOGGED = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "tokens")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of `steps` that is about to train: `name` is the id in its records (description["run"],
    or else the output folder's name); `first_step` steps were done when this process took over;
    `record` is what run.json holds."""

    name: str
    output: Path
    model: "PreTrainedModel"
    steps: int
    first_step: int
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, the first of which is 1, after the weights were updated.

    `tokens` (input tokens) and `seconds` are those of all steps so far, over all processes of the
    run, without checkpoints; `loss` is the mean per label of this step's batch, in nats, before the
    update; `gradient_norm` is from before clipping. `tokens_per_second` and `batch_stall`, the
    share of time in which this process prepared batches, are over the steps since the last line.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    batch_stall: float
    seconds_left: float


class DivergedError(ClearheadError):
    """The loss, a gradient or the weights are no longer finite. Checkpoints from before stay."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run that finished, or that stopped on a signal with a checkpoint.

    `steps`, `tokens` and `seconds` are those of all processes of the run, with compilation and
    without checkpoints; `peak_memory_bytes` is of this one; `final_loss` is in nats per label. The
    `model` is in evaluation mode. `stop_signal` is None where the run finished.
    """

    model: "PreTrainedModel"
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    final_loss: float
    stop_signal: signal.Signals | None

    @property
    def interrupted(self) -> bool:
        """True if steps remain; `train(..., resume=True)` does them."""
        return self.stop_signal is not None


class InterruptedRun(Stopped):
    """A signal stopped a run; it saved a checkpoint, from which the same command resumes."""


class Callback:
    """Base class of observers of a run: override any methods; none may change the weights. An
    exception in a method ends the run."""

    def start(self, run: Run) -> None:
        """Called before the first step, once checkpoint and settings are accepted."""

    def step(self, metrics: StepMetrics) -> None:
        """Called every `log_every` steps and after the last."""

    def checkpoint(self, path: Path) -> None:
        """Called after a checkpoint was written to the folder `path`."""

    def end(self, result: TrainResult) -> None:
        """Called after a finished or interrupted run, not after a failed one."""

    def close(self) -> None:
        """Called last, even after a failure: release files, threads and the terminal."""


class LinesFile(Callback):
    """Appends JSON lines, each with its "step", to `file` in OUTPUT. A resumed run first drops
    those after the step it resumes from; a damaged line is refused by its number."""

    file: str
    _advice = "make room and resume"

    def start(self, run: Run) -> None:
        self.run, self._path = run, run.output / self.file
        done = jsonl.steps(self._path, until=run.first_step)
        write_text(self._path, "".join(map(jsonl.encode, done)), self._advice)

    def write(self, lines: str) -> None:
        """Hand whole lines to the system at once: a killed process loses none."""
        with writing(self._path, self._advice), self._path.open("ab", buffering=0) as file:
            jsonl.put(file.fileno(), lines)


class MetricsFile(LinesFile):
    """Appends `StepMetrics`, without the time left, to OUTPUT/metrics.jsonl, as lines
    {"kind": "step", "run", "step", "loss", …}."""

    file = METRICS

    def step(self, metrics: StepMetrics) -> None:
        values = asdict(metrics)
        del values["seconds_left"]  # a guess for people, not a measurement
        self.write(jsonl.encode({"kind": "step", "run": self.run.name, **values}))


class Progress(Callback):
    """Shows steps, loss, learning rate, gradient norm, tokens/s and the time left on `stream`, by
    default standard error, or as a unit of longer `work`, which shows its own time left."""

    def __init__(self, stream: TextIO | None = None, work: Work | None = None) -> None:
        self._alone = work is None
        self._work = Line(stream) if work is None else work

    def start(self, run: Run) -> None:
        self._steps = run.steps
        if self._alone:
            self._work.start(1)
        if self._alone or run.first_step:
            resumed = f" from step {run.first_step}" if run.first_step else ""
            self._work.say(f"{run.name}: training {run.steps} steps{resumed}")
        self._work.resume(run.first_step / run.steps)

    def step(self, metrics: StepMetrics) -> None:
        left = f"  {in_words(metrics.seconds_left)} left" if self._alone else ""
        self._work.update(
            metrics.step / self._steps,
            f"step {metrics.step}/{self._steps}  loss {metrics.loss:.4f}  "
            f"lr {metrics.learning_rate:.2e}  norm {metrics.gradient_norm:.2f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s{left}",
        )

    def checkpoint(self, path: Path) -> None:
        if self._alone:
            self._work.say(f"saved {path}")

    def end(self, result: TrainResult) -> None:
        stopped = f" (stopped by {result.stop_signal.name})" if result.stop_signal else ""
        self._work.say(
            f"{result.steps} steps, {result.tokens:,} tokens in {in_words(result.seconds)} "
            f"({result.tokens_per_second:,.0f} tokens/s), loss {result.final_loss:.4f}, "
            f"peak memory {result.peak_memory_bytes / 2**20:,.0f} MiB{stopped}"
        )

    def close(self) -> None:
        if self._alone:
            self._work.close()


class TensorBoard(Callback):
    """Writes scalars to OUTPUT/tensorboard; needs the extra "tensorboard"."""

    _writer: Any = None

    def __init__(self) -> None:
        self._module = require("torch.utils.tensorboard", "tensorboard")

    def start(self, run: Run) -> None:
        """Open the log; a resumed run hides what was logged after the step it resumes from."""
        self._writer = self._module.SummaryWriter(
            log_dir=str(run.output / "tensorboard"),
            purge_step=run.first_step + 1 if run.first_step else None,
        )

    def step(self, metrics: StepMetrics) -> None:
        for name in LOGGED:
            self._writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Callback):
    """Logs to the Weights & Biases project "clearhead", under the run's name; needs the extra
    "wandb". Account and mode are those of wandb's own settings, such as WANDB_MODE=offline. A
    resumed run continues by the id that OUTPUT/wandb-id holds."""

    def __init__(self) -> None:
        self._module = require("wandb", "wandb")

    def start(self, run: Run) -> None:
        path = run.output / "wandb-id"
        if not (run.first_step and path.exists()):
            write_text(path, self._module.util.generate_id())
        self._module.init(
            project="clearhead",
            name=run.name,
            config=run.record["config"],
            id=path.read_text("utf-8"),
            resume="allow",
            dir=str(run.output),
        )

    def step(self, metrics: StepMetrics) -> None:
        values = {f"train/{name}": getattr(metrics, name) for name in LOGGED}
        self._module.log(values, step=metrics.step)

    def close(self) -> None:
        self._module.finish()  # without a run it does nothing


_TRACKERS: dict[Tracker, type[Callback]] = {"tensorboard": TensorBoard, "wandb": WandB}


def make_trackers(names: Iterable[Tracker]) -> list[Callback]:
    """Callbacks by name; a ClearheadError for one whose extra is not installed."""
    return [_TRACKERS[name]() for name in names]
