"""Checkpoints by PyTorch's Distributed Checkpoint: published atomically, with SHA-256 sums.

OUTPUT/checkpoints/step-00000100/
    shard-*.safetensors     a file a process: weights and optimizer state by the parameter's name,
                            and the state of random generators
    config.json, tokenizer.json, …  as in any Hugging Face folder; adapter_config.json where a
                            model has adapters, which alone are kept then
    trainer.json            step, settings, fingerprints, SHA-256 of each file

One process or many write the same format, and any number of them reads it. No pickle is written or
read.
"""

import re
import shutil
import warnings
from collections import defaultdict
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from clearhead.errors import ClearheadError, first_line
from clearhead.models.loading import AUTO_CLASS, explained, kind_of, load_config, without_bars
from clearhead.records import manifest
from clearhead.records.files import publish_folder
from clearhead.train.parallel import is_sharded
from clearhead.train.trainable import ADAPTERS, has_adapters, merge_adapters
from clearhead.train.world import ALONE, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "checkpoints"
TRAINER_FILE = manifest.CHECKPOINT_FILE
SHARDS = "shard-*.safetensors"
WEIGHTS, OPTIMIZER = "model/", "optimizer/"

# The names that `save` gives: no other folder, such as a copy of one, is ever counted or removed.
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
# Of Distributed Checkpoint, in a single process.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def folders(output: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    named = [path for path in (output / FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(named, key=_step)


def newest(output: Path) -> Path | None:
    """The last published checkpoint of a run."""
    return max(folders(output), key=_step, default=None)


def save(
    output: Path,
    *,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    optimizer: torch.optim.Optimizer,
    record: dict[str, Any],
    keep: int,
    world: World = ALONE,
) -> Path:
    """Publish the checkpoint of step `record["step"]`, then delete all but the `keep` newest."""
    target, alone = output / FOLDER / f"step-{record['step']:08d}", world.size == 1
    previous = newest(output)
    safe = f"the one before, {previous}, is whole" if previous else "there is none before it"
    advice = f"{safe}; make room and resume"
    with world.together(), ExitStack() as stack:
        # Written by all, published by the first.
        folder = world.by_first(lambda: stack.enter_context(publish_folder(target, advice)))
        state = weights(model) | _optimizer_state(model, optimizer)
        state |= _random_state(model.device, world)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            dcp.save(state, storage_writer=writer, process_group=world.control, no_dist=alone)
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            if alone:
                raise failure from None
            raise ClearheadError(
                f"process {rank} cannot write {folder} ({first_line(failure)}): {advice}"
            ) from error
        if world.first:
            if has_adapters(model):
                for settings in model.peft_config.values():
                    settings.save_pretrained(str(folder))
            else:
                config = copy(model.config)
                kinds = [kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)]
                config.architectures = [kinds[0].__name__]
                config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            manifest.seal(folder, record, name=TRAINER_FILE)
    for old in folders(output)[:-keep] if world.first else ():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
    return target


def export(
    target: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    world: World,
    advice: str,
) -> None:
    """Publish the whole model as an ordinary Hugging Face folder with checksums."""
    weights: dict[str, Any] | None = None
    if is_sharded(model):  # the parts of all processes, in the first
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            tied = first.setdefault(id(tensor), name)
            if name in weights:
                weights[name] = weights[tied]  # one tensor again, so that it is saved once

    def write() -> None:
        with publish_folder(target, advice) as folder:
            merge_adapters(model, folder / ADAPTERS)
            save_pretrained(model, tokenizer, folder, weights)
            manifest.seal(folder)

    world.by_first(write)


def save_pretrained(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write an ordinary Hugging Face folder; `weights` are the model's own by default."""
    with without_bars():
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its hash; return what trainer.json records."""
    older = [path for path in folders(folder.parent.parent) if _step(path) < _step(folder)]
    start = older[-1].name if older else "the first step"
    advice = f"delete {folder} to resume from {start}"
    record = manifest.verify(folder, name=TRAINER_FILE, advice=advice)
    if not any(folder.glob(SHARDS)):
        raise ClearheadError(f"{folder} is of an earlier version's format: {advice}")
    return record


def whole(folder: Path) -> "PreTrainedModel | None":
    """The model of a verified checkpoint, on the CPU in evaluation mode; None for any other folder,
    and for adapters without their model."""
    if not any(folder.glob(SHARDS)) or not (folder / "config.json").exists():
        return None
    verify(folder)
    name = str(folder)
    with explained(name):
        model = AUTO_CLASS[kind_of(name)].from_config(load_config(name), dtype=torch.float32)
    _read(weights(model), folder)
    return model.eval()


def restore(
    folder: Path, model: "PreTrainedModel", optimizer: torch.optim.Optimizer, world: World = ALONE
) -> None:
    """Load weights, optimizer state and random state from a verified checkpoint, in place; where
    another number of processes saved it, the random state stays as it is."""
    stored: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if is_sharded(model):
        get_optimizer_state_dict(model, optimizer)  # an empty state, placed as the parameters
        tensors = _optimizer_state(model, optimizer)
    else:
        tensors = {
            key: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for key, tensor in stored.items()
            if key.startswith(OPTIMIZER)
        }
    random = _random_state(model.device, world)
    if sum(key.startswith("random/cpu/") for key in stored) != world.size:
        random = {}
    random = {key: tensor for key, tensor in random.items() if key in stored}
    held = {key: tensor for key, tensor in tensors.items() if key in stored}
    _read(held | random | weights(model), folder, world)
    by_name: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for place, tensor in tensors.items():
        name, _, key = place.removeprefix(OPTIMIZER).rpartition("/")
        by_name[name][key] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    grouped = [names[one] for group in optimizer.param_groups for one in group["params"]]
    state = {number: by_name[name] for number, name in enumerate(grouped) if name in by_name}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for key, tensor in random.items():
        if "cuda" in key:
            torch.cuda.set_rng_state(tensor, model.device)
        else:
            torch.set_rng_state(tensor)


def _read(state: dict[str, torch.Tensor], folder: Path, world: World = ALONE) -> None:
    """Fill tensors in place, each process its part."""
    reader, alone = HuggingFaceStorageReader(str(folder)), world.size == 1
    dcp.load(state, storage_reader=reader, process_group=world.control, no_dist=alone)


def _optimizer_state(
    model: "PreTrainedModel", optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """This process's part of the optimizer's tensors, as optimizer/PARAMETER/KEY."""
    return {
        f"{OPTIMIZER}{name}/{key}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def weights(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Parameters and buffers that a checkpoint holds by name, tied ones once; of a model with
    adapters, whose weights stay, the adapters' parameters and the buffers."""
    held = model.state_dict(keep_vars=True)
    if has_adapters(model):
        buffers = {name for name, _ in model.named_buffers()}
        held = {name: held[name] for name in held if ".lora_" in name or name in buffers}
    once = {id(tensor): name for name, tensor in reversed(held.items())}
    return {WEIGHTS + name: t.detach() for name, t in held.items() if once[id(t)] == name}


def _random_state(device: torch.device, world: World) -> dict[str, torch.Tensor]:
    """The state of this process's generators, by name."""
    tensors = {f"random/cpu/{world.rank}": torch.get_rng_state()}
    if device.type == "cuda":
        tensors[f"random/cuda/{world.rank}"] = torch.cuda.get_rng_state(device)
    return tensors


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
