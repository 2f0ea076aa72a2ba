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
    """Perplexity, or the loss at hidden tokens, on `tokens` of validation text at each length; and
    attention and hidden states at the training length.

    Args:
        settings: those of the training.
        documents_apart: whether tokens of a window see only their own document.
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
    """Attention and hidden states, in the model's own basis and in the one in which OrthoAdam would
    step the embedding's columns with this seed, in one pass."""
    kind, share = settings.rotation or "hadamard", settings.rotation_share or "parameter"
    rotated = RotatedKurtosis(model, kind=kind, share=share, seed=settings.seed)
    parts: Any = {"attention": [ByTile(weights=[RowMeans()])]}
    parts["hidden"] = [HiddenStatistics(), rotated]
    return measure_inside(model, texts, batch_size=batch_size, **parts)


class Milestones(LinesFile):
    """Measures the model every few steps, and after the last, on the same few validation windows:
    outliers can then be read against the loss that they came with.

    Writes records {"kind": "measure", "run", "metric", "value", "step", …} to
    OUTPUT/milestones.jsonl: loss (nats a token), outliers of the hidden states and attention to the
    first token, over all layers. Training is not affected: the random state, each module's mode and
    compiled layers are restored.

    Args:
        settings: those of the training, whose sizes windows and batches have.
        every: steps between measurements, a multiple of the steps between logged ones.
    """

    file = MILESTONES
    afterwards = "go on"

    def __init__(
        self, corpus: Corpus, settings: TrainConfig, *, every: int, documents_apart: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.every = settings, every
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
        model: Any = self._run.model
        length, size = self.settings.sequence_length, self.settings.batch_size
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            read = perplexity(
                model, self._texts, length=length, batch_size=size, tokenizer=self._tokenizer
            )
            lines = states(model, self._texts, self.settings, batch_size=size)
        pooled = [line for line in lines if "layer" not in line and line["metric"] in METRICS]
        common = {"kind": "measure", "run": self._run.name, "step": metrics.step}
        loss = {"metric": "loss", "value": read.loss, "length": length}
        self.write("".join(encode({**common, **found}) for found in (loss, *pooled)))
