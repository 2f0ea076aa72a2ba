"""Measurements during training, so that outliers can be read against the loss that they came with.

The loop knows nothing of them: this is one of its callbacks.
"""

import math
from pathlib import Path
from typing import IO, Any

import torch

from clearhead.data import Corpus, windows
from clearhead.errors import ClearheadError
from clearhead.eval import perplexity
from clearhead.experiments.measures import states
from clearhead.report.records import as_line
from clearhead.train import Callback, Run, StepMetrics, TrainConfig
from clearhead.train.atomic import write_text
from clearhead.train.callbacks.metrics import lines_until

FILE = "milestones.jsonl"
WINDOWS = 16
METRICS = (
    "kurtosis",
    "kurtosis_rotated",
    "largest_activation",
    "first_token_argmax_share",
    "first_token_mass",
    "null_mass",
)


def milestone_steps(every: float, settings: TrainConfig) -> int:
    """Steps between measurements, or 0 for none, from a number of steps or a fraction of all.

    Raises:
        ClearheadError: for a number that is neither, or that falls between the steps logged.
    """
    if not (math.isfinite(every) and every >= 0) or (every > 1 and every != int(every)):
        raise ClearheadError(
            f"measure_every is {every}: give a whole number of steps, a fraction of all steps "
            "below 1, or 0"
        )
    logged = settings.log_every
    if every < 1:
        return math.ceil(every * settings.steps / logged) * logged
    if every % logged:
        raise ClearheadError(
            f"measure_every is {every:g}, but only every {logged} steps are logged: give a "
            "multiple of train.log_every"
        )
    return int(every)


class Milestones(Callback):
    """Measures the model every few steps, and after the last, on the same few validation windows.

    Writes records {"kind": "measure", "run", "metric", "value", "step", …} to
    OUTPUT/milestones.jsonl: loss (nats a token), outliers of the hidden states and attention to the
    first token, over all layers. Training goes on as if nothing had been: the random state, each
    module's mode and what was compiled are as before. A resumed run drops what was measured after
    the step it resumes from.

    Args:
        settings: those of the training: windows and batches are of its sizes.
        every: steps between measurements, a multiple of the steps between logged ones.
    """

    def __init__(self, corpus: Corpus, settings: TrainConfig, *, every: int) -> None:
        self.settings = settings
        self.every = every
        self._texts = list(windows(corpus, length=settings.sequence_length, count=WINDOWS))
        self._run: Run | None = None
        self._file: IO[str] | None = None

    def start(self, run: Run) -> None:
        """Open the file, cut back to the steps that are done."""
        self._run = run
        path = run.output / FILE
        try:
            write_text(path, lines_until(path, run.first_step))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _refused(path, error) from error

    def step(self, metrics: StepMetrics) -> None:
        """Measure, where it is time."""
        assert self._run is not None
        assert self._file is not None
        if metrics.step % self.every and metrics.step != self._run.steps:
            return
        common = {"kind": "measure", "run": self._run.name, "step": metrics.step}
        lines = [as_line({**common, **found}) for found in self._measured(self._run.model)]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise _refused(self._file.name, error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _measured(self, model: Any) -> list[dict[str, Any]]:
        length, size = self.settings.sequence_length, self.settings.batch_size
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            read = perplexity(model, self._texts, length=length, batch_size=size)
            found = list(states(model, self._texts, self.settings, batch_size=size))
        pooled = [line for line in found if "layer" not in line and line["metric"] in METRICS]
        return [{"metric": "loss", "value": read.loss, "length": length}, *pooled]


def _refused(path: Path | str, error: OSError) -> ClearheadError:
    return ClearheadError(f"cannot write {path} ({error.strerror}): make room and go on")
