"""Measures of every model of a comparison, as the payloads of its records."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from clearhead.data import Corpus, windows
from clearhead.diagnose import HiddenStatistics, RotatedKurtosis, RowMeans, attention_maps
from clearhead.eval import lengths as perplexity_by_length
from clearhead.eval import masked_loss
from clearhead.probe import ByTile
from clearhead.probe import measure as measure_inside
from clearhead.train import TrainConfig

DIAGNOSED_WINDOWS = 32
HEAT_MAP_TOKENS = 48
TOKENS_IN_A_BATCH = 4096


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
    if getattr(model, "objective", None) == "mlm":
        for size in lengths:
            yield from masked_loss(
                model, corpus, length=size, tokens=tokens, documents_apart=documents_apart
            )
    else:
        yield from perplexity_by_length(
            model,
            corpus,
            lengths=lengths,
            tokens=tokens,
            documents_apart=documents_apart,
        )
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


def attention_records(
    model: Any, corpus: Corpus, at: Literal["anywhere", "documents"] = "anywhere"
) -> Iterator[dict[str, Any]]:
    """Heat-maps of one validation text, with its tokens spelt out; of a document's beginning, or
    of wherever the split begins."""
    text = next(iter(windows(corpus, length=HEAT_MAP_TOKENS, count=1, at=at)))
    spelt = [corpus.tokenizer.decode([token]) for token in text.tolist()]
    for line in attention_maps(model, torch.as_tensor(text)):
        yield {**line, "text": spelt}
