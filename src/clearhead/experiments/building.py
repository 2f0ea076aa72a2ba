"""From a preset's name and a corpus to what a training run takes."""

from typing import Any

import torch

from clearhead.data import Batches, Corpus, MaskedBatches, Masking
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.models import ClearheadConfig, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.nn import REGISTRY
from clearhead.train import TrainConfig

# Objective → the model class that learns it.
OBJECTIVES = {cls.objective: cls for cls in (ClearheadForCausalLM, ClearheadForMaskedLM)}


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


def check_room(config: ClearheadConfig, settings: TrainConfig) -> None:
    """Refuse windows longer than the model can tell positions apart."""
    with torch.device("meta"):
        position = REGISTRY.find("position", config.position).build(config.layer(0), 1)
    limit, length = position.longest(), settings.sequence_length
    if limit is not None and length > limit:
        raise ClearheadError(
            f"windows of {length} tokens are more than the {limit} positions of "
            f"position={config.position!r}: lower sequence_length, or raise max_position_embeddings"
        )


def batches(corpus: Corpus, settings: TrainConfig) -> Batches:
    """The training batches that the settings ask for."""
    return Batches(
        corpus,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        document_masks=settings.document_masks,
    )


def masked_batches(corpus: Corpus, settings: TrainConfig, share: float = SHARE) -> MaskedBatches:
    """The same windows in the same order, with a share of their tokens hidden.

    `corpus` has a mask token: `clearhead.data.with_mask_token`.
    """
    return MaskedBatches(batches(corpus, settings), Masking(corpus.tokenizer, share))


def objective_of(config: ClearheadConfig) -> str:
    """What a model can learn: hidden tokens where it sees both sides, else the next."""
    return "mlm" if config.direction == "bidirectional" else "next-token"


def check_objective(name: str, config: ClearheadConfig) -> None:
    """Refuse a preset that cannot learn the objective, naming what it can."""
    learns = objective_of(config)
    if learns != name:
        raise ClearheadError(
            f"this preset has direction={config.direction!r}, which cannot learn {name}: choose "
            f"--objective {learns}, or another preset"
        )


def masked_recipe() -> TrainConfig:
    """The crammed BERT's recipe (arXiv 2212.14034): what masked training does unless told other.

    Its budget was a day of wall-clock, its full step 8,192 rows; here steps and tokens are counted.
    """
    return TrainConfig(
        sequence_length=128,
        batch_size=16,
        accumulation=8,
        ramp=0.6,
        learning_rate=1e-3,
        final_learning_rate=0.0,
        schedule="triangle",
        warmup=0.75,
        weight_decay=0.01,
        betas=(0.9, 0.98),
        epsilon=1e-12,
        clip=0.5,
    )
