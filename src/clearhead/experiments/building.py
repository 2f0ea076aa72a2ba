"""From a preset's name and a corpus to what a training run takes."""

from typing import Any

import torch

from clearhead.data import Batches, Corpus
from clearhead.models import ClearheadConfig, preset
from clearhead.train import TrainConfig


def best_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fitted(
    name: str, size: str, corpus: Corpus, settings: TrainConfig, **changes: Any
) -> ClearheadConfig:
    """The preset with the corpus's vocabulary and special tokens, and room for its windows.

    `changes` are the user's own keys, and win.
    """
    base = preset(name, size, **changes)
    keys = {
        "vocab_size": corpus.vocabulary_size,
        "max_position_embeddings": max(base.max_position_embeddings, settings.sequence_length),
        "bos_token_id": corpus.tokenizer.bos_token_id,
        "eos_token_id": corpus.tokenizer.eos_token_id,
        "pad_token_id": corpus.tokenizer.pad_token_id,
    }
    return preset(name, size, **{**keys, **changes})


def batches(corpus: Corpus, settings: TrainConfig) -> Batches:
    """The training batches that the settings ask for."""
    return Batches(
        corpus,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        document_masks=settings.document_masks,
    )
