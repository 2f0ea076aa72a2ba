"""The loop's data protocol, and its checks before the first step."""

import inspect
from typing import TYPE_CHECKING, Protocol

import torch

from clearhead.data.batches import IGNORED
from clearhead.errors import ClearheadError
from clearhead.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEXT_TOKEN = "next-token"
CLASSIFICATION = "classification"


class BatchSource(Protocol):
    """A source of batches that are a pure function of their number, which makes resuming exact.

    Optional attributes: `fingerprint` (str) identifies the data, and a run is not resumed on other
    data; `begin` (int or None) is the first token of every window; `objective` (str), by default
    "next-token", is the meaning of labels. With "mlm" they are at the hidden tokens' own positions;
    with "classification" a text has one label, [B], and batches may be smaller than batch_size x
    sequence_length. Optional method: `tokens_before(step)` counts the tokens of earlier batches,
    where rows are not all of the settings' sequence_length.
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
    masked, name = "document_ids" in batch, type(model).__name__
    shape, expected = tuple(batch["input_ids"].shape), (config.batch_size, config.sequence_length)
    # An epoch's last batch has fewer texts, and texts differ.
    fits = tuple(map(max, shape, expected)) if objective == CLASSIFICATION else shape
    problem = ""
    if learns != objective:
        problem = f"{name} learns {learns}, but the labels of the batches are for {objective}"
    elif fits != expected:
        problem = (
            f"the batches are {shape[0]} x {shape[1]} tokens, but batch_size x sequence_length is "
            f"{expected[0]} x {expected[1]}"
        )
    elif masked != config.document_masks:
        which = "with" if masked else "without"
        problem = (
            f"document_masks is {config.document_masks}, but the batches come {which} document_ids"
        )
    # Hugging Face models swallow unknown arguments without a word.
    elif masked and "document_ids" not in inspect.signature(model.forward).parameters:
        problem = f"{name} takes no document_ids, so document_masks would do nothing: turn it off"
    if problem:
        raise ClearheadError(problem)
