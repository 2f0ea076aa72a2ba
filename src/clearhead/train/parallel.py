"""A step's batches and its gradients, in one process or several, by PyTorch's DDP or FSDP2."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from clearhead.data.batches import IGNORED
from clearhead.errors import ClearheadError
from clearhead.models.inspection import decoder_layers
from clearhead.settings.train import TrainConfig
from clearhead.train import precision
from clearhead.train.world import ALONE, World

NEXT_TOKEN = "next-token"
CLASSIFICATION = "classification"


class BatchSource(Protocol):
    """A source of batches that are a pure function of their number, which makes resuming exact.

    Optional attributes, and an optional method:

    - `fingerprint` (str) identifies the data; a run is not resumed on other data.
    - `begin` (int or None) is the first token of every window.
    - `objective` (str), by default "next-token", is the meaning of labels. With "mlm" they are at
      the hidden tokens' own positions, and the model shifts nothing. With "classification" a text
      has one label, [B], and batches may be smaller than batch_size x sequence_length.
    - `tokens_before(step)` counts the tokens of earlier batches, where rows are not all of the
      settings' sequence_length.
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


def check(batches: BatchSource, model: PreTrainedModel, config: TrainConfig) -> None:
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


def spread(
    model: PreTrainedModel, batches: BatchSource, config: TrainConfig, world: World
) -> Callable[..., Any]:
    """Spread `model` as `config` asks, in place; FSDP2 makes its parameters DTensors. Returns what
    runs the model: itself, or DDP around it."""
    if world.size > 1 and objective_of(batches) == CLASSIFICATION:
        raise ClearheadError("an epoch's last batch cannot be shared: fine-tune in one process")
    if config.lora and config.parallel == "fsdp":
        raise ClearheadError("lora trains few weights, not worth sharding: choose parallel ddp")
    dealt_among(config, world.size)  # refuses before anything is written
    if config.checkpointing == "blocks":
        recompute(model, True)
    if config.parallel == "fsdp":  # every decoder layer, and all other modules as one
        options: dict[str, Any] = {"mesh": init_device_mesh(model.device.type, (world.size,))}
        if config.precision == "bf16":
            # Gathered in half the bytes; gradients are added up in float32.
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in decoder_layers(model):
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(model, **options)
    elif world.size > 1:
        # Gradients lie where they are exchanged: a third less of the exchange's CPU time.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def dealt_among(config: TrainConfig, size: int) -> int:
    """The number of groups of processes that share a step's batches; a group shares their rows."""
    steps = {end - start for start, end in pairwise(config.starts)}
    dealt = math.gcd(size, *steps)
    if config.batch_size % (size // dealt):
        raise ClearheadError(
            f"{size} processes cannot share a step of accumulation {min(steps)} x batch_size "
            f"{config.batch_size} equally: make batch_size a multiple of {size // dealt}, or start "
            "another number of processes"
        )
    return dealt


def own_part(
    batches: BatchSource, numbers: Sequence[int], world: World, dealt: int
) -> list[dict[str, torch.Tensor]]:
    """This process's part of a step: whole batches, or its rows of them (see `dealt_among`)."""
    sharing = world.size // dealt  # the rows of one batch
    place, part = divmod(world.rank, sharing)
    own = [batches.batch(number) for number in numbers[place::dealt]]
    return [{key: t.chunk(sharing)[part] for key, t in batch.items()} for batch in own]


def accumulate(
    model: PreTrainedModel,
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
    mode: precision.Resolved,
    objective: str = NEXT_TOKEN,
    forward: Callable[..., Any] | None = None,
    world: World = ALONE,
) -> torch.Tensor:
    """Add the gradients of one step's micro-batches to the parameters; return the step's loss.

    With a model that is spread over several processes: this process's micro-batches and part of the
    loss, and the `forward` that `spread` gave.

    The loss is that of one batch holding them all: each micro-batch's mean is weighted by its share
    of the labels, since some models silently ignore an argument such as `num_items_in_batch`.
    """
    counts = [label_count(dict(batch), objective) for batch in micro_batches]
    labels = sum(world.gather(sum(counts)))
    if not labels:
        raise ClearheadError("a step has no label to learn from: give longer documents or batches")
    device, forward = model.device, forward or model
    cached = "use_cache" in inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if cached else {}
    total = torch.zeros((), device=device)
    for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True), 1):
        if count == 0 and world.size == 1:
            continue  # its mean would be 0 / 0
        # A process that left a batch without labels out would take no part in the exchange of
        # gradients: its loss is multiplied by 0.
        batch = dict(batch) if count else {**batch, "labels": batch["input_ids"]}
        inputs = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        # FSDP2 adds up at each, since unreduced gradients take a whole model's memory.
        ddp = forward if isinstance(forward, DistributedDataParallel) else None
        with ddp.no_sync() if ddp and number < len(counts) else nullcontext():
            with precision.autocast(mode, device):
                loss = forward(**inputs, **extra).loss * (count / labels)
            # Gradients are averaged over processes.
            (loss * world.size if world.size > 1 else loss).backward()
        total += loss.detach()
    return total


def recompute(model: PreTrainedModel, wanted: bool) -> None:
    """Switch activation checkpointing by block on or off; transformers renamed it in 2026."""
    verb, options = ("enable", ({"use_reentrant": False},)) if wanted else ("disable", ())
    name = f"activation_checkpointing_{verb}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{verb}")(*options)


def is_sharded(model: nn.Module) -> bool:
    """True if no process has the whole model."""
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered from all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
