"""Measurements during training, so that outliers can be read against the loss that they came with.

The loop knows nothing of them: this is one of its callbacks.
"""

from typing import Any

import torch

from clearhead.data import Corpus, windows
from clearhead.eval import perplexity
from clearhead.experiments.final_measures import states
from clearhead.records.loading import as_line
from clearhead.train import Run, StepMetrics, TrainConfig
from clearhead.train.callbacks import LinesFile

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


class Milestones(LinesFile):
    """Measures the model every few steps, and after the last, on the same few validation windows.

    Writes records {"kind": "measure", "run", "metric", "value", "step", …} to
    OUTPUT/milestones.jsonl: loss (nats a token), outliers of the hidden states and attention to the
    first token, over all layers. Training goes on as if nothing had been: the random state, each
    module's mode and what was compiled are as before.

    Args:
        settings: those of the training: windows and batches are of its sizes.
        every: steps between measurements, a multiple of the steps between logged ones.
        documents_apart: whether the loss keeps the documents of a window apart.
    """

    file = FILE
    afterwards = "go on"

    def __init__(
        self, corpus: Corpus, settings: TrainConfig, *, every: int, documents_apart: bool = False
    ) -> None:
        super().__init__()
        self.settings = settings
        self.every = every
        self._texts = list(windows(corpus, length=settings.sequence_length, count=WINDOWS))
        self._tokenizer = corpus.tokenizer if documents_apart else None

    def start(self, run: Run) -> None:
        """Open the file."""
        super().start(run)
        self._run = run

    def step(self, metrics: StepMetrics) -> None:
        """Measure, where it is time."""
        if metrics.step % self.every and metrics.step != self._run.steps:
            return
        common = {"kind": "measure", "run": self._run.name, "step": metrics.step}
        lines = [as_line({**common, **found}) for found in self._measured(self._run.model)]
        self.write("".join(lines))

    def _measured(self, model: Any) -> list[dict[str, Any]]:
        length, size = self.settings.sequence_length, self.settings.batch_size
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            read = perplexity(
                model, self._texts, length=length, batch_size=size, tokenizer=self._tokenizer
            )
            lines = states(model, self._texts, self.settings, batch_size=size)
        pooled = [line for line in lines if "layer" not in line and line["metric"] in METRICS]
        return [{"metric": "loss", "value": read.loss, "length": length}, *pooled]
