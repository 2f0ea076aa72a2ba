"""A model spread over the processes of a run by PyTorch's DDP or FSDP2."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError
from clearhead.models.inspection import decoder_layers
from clearhead.train import precision
from clearhead.train.batches import (
    CLASSIFICATION,
    NEXT_TOKEN,
    BatchSource,
    label_count,
    objective_of,
)
from clearhead.train.config import TrainConfig
from clearhead.train.world import ALONE, World


def spread(
    model: PreTrainedModel, batches: BatchSource, config: TrainConfig, world: World
) -> Callable[..., Any]:
    """Spread `model` as `config` asks, in place; FSDP2 makes its parameters DTensors.

    Returns what runs the model: itself, or DDP around it.
    """
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
    """This process's part of a step: whole batches, or its rows of them, as `dealt_among` has it."""
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
