"""Checkpoints that several processes write and any number of them reads: Distributed Checkpoint.

Its tensors lie in safetensors, a file a process, each with the offsets of its parts; no pickle is
written or read. What is no tensor is in trainer.json.
"""

import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clearhead.errors import ClearheadError
from clearhead.models.loading import (
    auto_class,
    explained,
    kind_of,
    load_config,
    save_tokenizer,
)
from clearhead.records.files import utf8_name
from clearhead.train import optimizer_state
from clearhead.train.parallel import plain_class
from clearhead.train.world import ALONE, World

PREFIX = "model"
FILES = "shard-*.safetensors"
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def is_sharded_folder(folder: Path) -> bool:
    """True for a checkpoint of this kind."""
    return any(folder.glob(FILES))


def write(folder: Path, state: dict[str, Any], world: World, advice: str) -> None:
    """Write weights, optimizer state and random state; every process writes its part.

    Raises:
        ClearheadError: in all processes, where one of them cannot write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=world.writing)
    except CheckpointException as error:
        rank, failure = next(iter(error.failures.items()))
        reason = (str(failure[0]).splitlines() or [type(failure[0]).__name__])[0]
        raise world.told(
            ClearheadError(f"process {rank} cannot write {folder} ({reason}): {advice}")
        ) from error


def read(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    record: Mapping[str, Any],
    world: World,
) -> None:
    """Load a verified checkpoint in place, each process its part: also one of a single process.

    Args:
        names: of every parameter.
        record: trainer.json's.
    """
    get_optimizer_state_dict(model, optimizer)  # makes an empty state, placed as the parameters
    made, _ = optimizer_state.pack(names, optimizer)
    outline = record["optimizer"]
    tensors = {place: made[place] for place in optimizer_state.places(outline) if place in made}
    state = dict(tensors)
    random = dict[str, torch.Tensor]()
    own = {f"{name}/{world.rank}": name for name in random_state(model.device)}
    if is_sharded_folder(folder):
        state |= named_weights(model)
        if record["processes"] == world.size:  # else dropout starts anew
            found = random_state(model.device)
            random = {key: found[name] for key, name in own.items()}
            state |= random
    _load(state, folder, world)
    optimizer_state.unpack(names, optimizer, tensors, outline)
    if random:
        set_random_state({name: random[key] for key, name in own.items()}, model.device)


def save_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Write what a Hugging Face folder has beside weights, so that one can be made of this."""
    config = copy(model.config)
    config.architectures = [plain_class(model).__name__]
    config.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def load_whole(folder: Path) -> PreTrainedModel:
    """The model of a verified checkpoint of this kind, whole, on the CPU."""
    name = str(folder)
    with explained(name):
        model = auto_class(kind_of(name)).from_config(load_config(name), dtype=torch.float32)
    _load(dict(named_weights(model)), folder, ALONE)
    return model.eval()


def _load(state: dict[str, torch.Tensor], folder: Path, world: World) -> None:
    """Fill tensors in place, each process its part."""
    alone = world.size == 1
    with warnings.catch_warnings(), utf8_name(folder) as place:
        reader = HuggingFaceStorageReader(str(place))
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process it is
        dcp.load(state, storage_reader=reader, process_group=world.control, no_dist=alone)


def whole_weights(model: PreTrainedModel) -> dict[str, Any]:
    """The weights with the parts of all processes, in the first; nothing in the others."""
    whole = get_model_state_dict(model, options=_FULL)
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied = first.setdefault(id(tensor), name)
        if name in whole:
            whole[name] = whole[tied]  # one tensor again, so that it is saved once
    return whole


def set_whole_weights(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Give every process its part of `weights`, which each has whole."""
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of PyTorch's generators, by name."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def set_random_state(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set what `random_state` gave."""
    torch.set_rng_state(tensors["random/cpu"].clone())
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"].clone(), device)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a checkpoint holds, each once: tied ones share a tensor."""
    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"{PREFIX}/{name}", tensor.detach()
