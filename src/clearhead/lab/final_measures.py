"""Measures of every model of a comparison, at the end and during training, as records."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from clearhead.data import Corpus, windows
from clearhead.diagnose import HiddenStatistics, RotatedKurtosis, RowMeans
from clearhead.eval import lengths as perplexity_by_length
from clearhead.eval import masked_loss, perplexity
from clearhead.probe import ByTile
from clearhead.probe import measure as measure_inside
from clearhead.records.jsonl import encode
from clearhead.train import Run, StepMetrics, TrainConfig
from clearhead.train.callbacks import LinesFile

DIAGNOSED_WINDOWS = 32
TOKENS_IN_A_BATCH = 4096
MILESTONES = "milestones.jsonl"
WINDOWS = 16  # of a milestone
METRICS = (
    *("kurtosis", "kurtosis_rotated", "largest_activation"),
    *("first_token_argmax_share", "first_token_mass", "null_mass", "prefix_mass"),
)


def measure(
    model: Any,
    corpus: Corpus,
    settings: TrainConfig,
    *,
    lengths: Sequence[int],
    tokens: int,
    documents_apart: bool = False,
) -> Iterator[dict[str, Any]]:
    """Perplexity by length, or the loss at hidden tokens; attention and hidden states at the
    training length.

    Args:
        settings: those of the training.
        lengths: window lengths of the perplexities.
        tokens: validation tokens read at each length, and at most for attention and states.
        documents_apart: whether these losses keep the documents of a window apart.
    """
    read: dict[str, Any] = {"tokens": tokens, "documents_apart": documents_apart}
    if getattr(model, "objective", None) == "mlm":
        for size in lengths:
            yield from masked_loss(model, corpus, length=size, **read)
    else:
        yield from perplexity_by_length(model, corpus, lengths=lengths, **read)
    length = settings.sequence_length
    count = min(DIAGNOSED_WINDOWS, max(1, tokens // length))
    texts = list(windows(corpus, length=length, count=count))
    yield from states(model, texts, settings, batch_size=max(1, TOKENS_IN_A_BATCH // length))


def states(
    model: Any, texts: Sequence[torch.Tensor], settings: TrainConfig, *, batch_size: int
) -> list[dict[str, Any]]:
    """Attention and hidden states, in the model's own basis and in OrthoAdam's, in one pass.

    OrthoAdam's basis is the one in which it would step the embedding's columns with this seed; the
    training may have used another optimizer.
    """
    rotated = RotatedKurtosis(
        model,
        kind=settings.rotation or "hadamard",
        share=settings.rotation_share or "parameter",
        seed=settings.seed,
    )
    return measure_inside(
        model,
        texts,
        batch_size=batch_size,
        attention=[ByTile(weights=[RowMeans()])],
        hidden=[HiddenStatistics(), rotated],
    )


class Milestones(LinesFile):
    """Measures the model every few steps, and after the last, on the same few validation windows:
    outliers can then be read against the loss that they came with.

    Writes records {"kind": "measure", "run", "metric", "value", "step", …} to
    OUTPUT/milestones.jsonl: loss (nats a token), outliers of the hidden states and attention to the
    first token, over all layers. Training goes on as if nothing had been: the random state, each
    module's mode and what was compiled are as before.

    Args:
        settings: those of the training: windows and batches are of its sizes.
        every: steps between measurements, a multiple of the steps between logged ones.
        documents_apart: whether the loss keeps the documents of a window apart.
    """

    file = MILESTONES
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
        lines = [encode({**common, **found}) for found in self._measured(self._run.model)]
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
