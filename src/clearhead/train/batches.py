"""The loop's data protocol, and its checks before the first step."""

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch

from clearhead.data.batches import IGNORED
from clearhead.errors import ClearheadError
from clearhead.models.configuration import WINDOW_BEGIN
from clearhead.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEXT_TOKEN = "next-token"
CLASSIFICATION = "classification"


class BatchSource(Protocol):
    """A source of batches that are a pure function of their number, which makes resuming exact.

    Optional attribute `fingerprint` (str) identifies the data; a run is not resumed on other data.

    Optional attribute `begin` (int or None) is the first token of every window.

    Optional attribute `objective` (str), by default "next-token", is the meaning of labels: with
    "mlm" they are at the hidden tokens' own positions, and the model shifts nothing; with
    "classification" a text has one label, [B], and batches may be smaller than batch_size x
    sequence_length.

    Optional method `tokens_before(step)` counts the tokens of earlier batches, where rows are not
    all of the settings' sequence_length.
    """

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Batch number `step`, on the CPU: "input_ids" and "labels", int64 [B, T], and whatever
        else the model's forward takes by name. Labels are not shifted (the model does that), and
        -100 is left out of the loss."""


def objective_of(batches: BatchSource) -> str:
    """The `objective` of the batches, "next-token" by default (see `BatchSource`)."""
    return getattr(batches, "objective", NEXT_TOKEN)


def label_count(batch: dict[str, torch.Tensor], objective: str = NEXT_TOKEN) -> int:
    """Number of labels in the loss of `batch`; for the next token all but each window's first."""
    labels_BT = batch["labels"]
    if objective == CLASSIFICATION:
        return len(labels_BT)  # every number is a label of a regression
    return int(((labels_BT[:, 1:] if objective == NEXT_TOKEN else labels_BT) != IGNORED).sum())


def check(batches: BatchSource, model: "PreTrainedModel", config: TrainConfig) -> None:
    """Refuse a first batch that contradicts the settings, or has a mask without effect."""
    batch, objective = batches.batch(0), objective_of(batches)
    learns = getattr(model, "objective", objective)  # other models than ours do not say
    if learns != objective:
        raise ClearheadError(
            f"{type(model).__name__} learns {learns}, but the labels of the batches are for "
            f"{objective}: make both the same"
        )
    shape = tuple(batch["input_ids"].shape)
    expected = (config.batch_size, config.sequence_length)
    largest = shape
    if objective == CLASSIFICATION:  # an epoch's last batch has fewer texts, and texts differ
        largest = tuple(map(max, shape, expected))
    if largest != expected:
        raise ClearheadError(
            f"the batches are {shape[0]} x {shape[1]} tokens, but batch_size x sequence_length "
            f"is {expected[0]} x {expected[1]}: make both the same"
        )
    masked = "document_ids" in batch
    if masked != config.document_masks:
        raise ClearheadError(
            f"document_masks is {config.document_masks}, but the batches come "
            f"{'with' if masked else 'without'} document_ids: make both the same"
        )
    # Hugging Face models swallow unknown arguments without a word.
    if masked and "document_ids" not in forward_parameters(model):
        raise ClearheadError(
            f"{type(model).__name__} takes no document_ids, so document_masks would do nothing: "
            "turn it off, or train a clearhead model"
        )


def keep_begin(batches: BatchSource, model: "PreTrainedModel") -> None:
    """Write the token that opens every window into the model's configuration, so that measurements
    open windows alike; remove an earlier training's token if there is none."""
    begin = getattr(batches, "begin", None)
    if begin is not None:
        setattr(model.config, WINDOW_BEGIN, begin)
    elif hasattr(batches, "begin"):
        vars(model.config).pop(WINDOW_BEGIN, None)


def forward_parameters(model: "PreTrainedModel") -> dict[str, Any]:
    """The named parameters of the model's forward."""
    return dict(inspect.signature(model.forward).parameters)
