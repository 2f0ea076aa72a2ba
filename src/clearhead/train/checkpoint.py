"""Checkpoints: whole or absent, safetensors only, and every byte of them vouched for.

OUTPUT/checkpoints/step-00000100/
    config.json, model.safetensors, …   what save_pretrained writes: loads with AutoModel
    tokenizer.json, …                   where a tokenizer was given
    optimizer.safetensors               optimizer state by parameter name, random state
    trainer.json                        step, settings, fingerprints, what of the optimizer is not
                                        a tensor, SHA-256 of each file

Of several processes (`sharded_checkpoint`) weights and state lie in shard-*.safetensors instead.
Of a model with adapters it holds these alone (adapter_model.safetensors), not what they adapt.
"""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from clearhead.models.loading import pretrained, save_tokenizer, without_bars
from clearhead.records import manifest
from clearhead.records.files import publish_folder, utf8_name
from clearhead.train import adapters, optimizer_state, sharded_checkpoint
from clearhead.train.parallel import is_sharded, plain_class
from clearhead.train.saver import Saver
from clearhead.train.world import ALONE, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "checkpoints"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = manifest.CHECKPOINT_FILE

# The names that `save` gives: no other folder, such as a copy of one, is ever counted or removed.
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")


def folders(output: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    found = [path for path in (output / FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def newest(output: Path) -> Path | None:
    """The last published checkpoint of a run."""
    return next(reversed(folders(output)), None)


def prepare(model: "PreTrainedModel", optimizer: torch.optim.Optimizer, saver: Saver) -> None:
    """Have `saver` take the memory of its copies before the first checkpoint, while steps go on.

    The optimizer has its state: a step was made.
    """
    weights, tensors, _ = _state(model, optimizer, sharded=_in_shards(model, saver.world))
    saver.prepare(weights, tensors)


def save(
    output: Path,
    *,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    optimizer: torch.optim.Optimizer,
    record: dict[str, Any],
    keep: int,
    saver: Saver,
    last: bool,
) -> None:
    """Have `saver` publish the checkpoint of step `record["step"]`, then delete all but the `keep`
    newest.

    It is written beside the training, of a copy of the state in host memory, unless it is the
    `last`, with nothing to go on beside it, or there is no room for a copy.

    Raises:
        ClearheadError: where it cannot be written, on a full disk for one, here or from the saver;
            those before it are as they were.
    """
    world = saver.world
    target = output / FOLDER / f"step-{record['step']:08d}"
    previous = newest(output)
    safe = f"the one before, {previous}, is whole" if previous else "there is none before it"
    advice = f"{safe}; make room and resume"
    sharded = _in_shards(model, world)
    with ExitStack() as stack:
        # Written by all, published by the first.
        folder = world.by_first(lambda: stack.enter_context(publish_folder(target, advice)))
        weights, tensors, outline = _state(model, optimizer, sharded=sharded)
        random = sharded_checkpoint.random_state(model.device)
        if sharded:
            random = {f"{name}/{world.rank}": tensor for name, tensor in random.items()}
        beside = not last and saver.prepare(weights, tensors)
        if beside:
            weights, tensors = saver.copies(weights), saver.copies(tensors)
        publishing = stack.pop_all()

    def write() -> Path:
        with publishing:
            if sharded:
                state = weights | tensors | random
                sharded_checkpoint.write(folder, state, world, advice)
            if world.first:
                if sharded:
                    sharded_checkpoint.save_config(model, tokenizer, folder)
                else:
                    save_pretrained(model, tokenizer, folder, weights)
                    save_file(tensors | random, folder / OPTIMIZER_FILE)
                manifest.seal(folder, {**record, "optimizer": outline}, name=TRAINER_FILE)
        for old in folders(output)[:-keep] if world.first else ():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        return target

    saver.start(write, beside=beside)


def export(
    target: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    world: World,
    advice: str,
) -> None:
    """Publish the whole model as an ordinary Hugging Face folder, sealed."""
    weights = sharded_checkpoint.whole_weights(model) if is_sharded(model) else None

    def write() -> None:
        with publish_folder(target, advice) as folder:
            adapters.merge(model, folder / adapters.FOLDER)
            save_pretrained(model, tokenizer, folder, weights)
            manifest.seal(folder)

    world.by_first(write)


def save_pretrained(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model and tokenizer as an ordinary Hugging Face folder; `weights` are the model's own
    where they are not given."""
    with without_bars():
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its hash; return what trainer.json records.

    Raises:
        ClearheadError: as `manifest.verify`.
    """
    older = [path for path in folders(folder.parent.parent) if _step(path) < _step(folder)]
    start = older[-1].name if older else "the first step"
    advice = f"delete {folder} to resume from {start}"
    return manifest.verify(folder, name=TRAINER_FILE, advice=advice)


def whole(folder: Path) -> "PreTrainedModel | None":
    """The model of a checkpoint that several processes wrote; None for any other folder.

    Raises:
        ClearheadError: as `verify`.
    """
    if not sharded_checkpoint.is_sharded_folder(folder):
        return None
    verify(folder)
    return sharded_checkpoint.load_whole(folder)


def restore(
    folder: Path, model: "PreTrainedModel", optimizer: torch.optim.Optimizer, world: World = ALONE
) -> None:
    """Load weights, optimizer state and random state from a verified checkpoint, in place.

    Random state is that of the process, or seeded anew where another number of them wrote it.
    """
    record = json.loads((folder / TRAINER_FILE).read_text(encoding="utf-8"))
    sharded = sharded_checkpoint.is_sharded_folder(folder)
    with utf8_name(folder / OPTIMIZER_FILE) as file:
        tensors = {} if sharded else load_file(file)
    if adapters.present(model) and not sharded:
        adapters.restore(folder, model, tensors)
    elif not sharded:
        # Through from_pretrained, because only it knows each architecture's tied and renamed
        # weights; copied over, so that the optimizer still holds the same parameters.
        kind = plain_class(model)
        stored = pretrained(kind, folder, dtype=torch.float32, local_files_only=True)
        sharded_checkpoint.set_whole_weights(model, stored.state_dict())
    names = _parameter_names(model)
    if sharded or is_sharded(model):
        sharded_checkpoint.read(folder, model, optimizer, names, record, world)
        return
    optimizer_state.unpack(names, optimizer, tensors, record["optimizer"])
    if record.get("processes", 1) == world.size:
        sharded_checkpoint.set_random_state(tensors, model.device)


def _in_shards(model: "PreTrainedModel", world: World) -> bool:
    """True if each process writes its part of a checkpoint."""
    return world.size > 1 or is_sharded(model)


def _state(
    model: "PreTrainedModel", optimizer: torch.optim.Optimizer, *, sharded: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, the other tensors and the optimizer's outline: of this process, where `sharded`."""
    tensors, outline = optimizer_state.pack(_parameter_names(model), optimizer)
    if sharded:
        return dict(sharded_checkpoint.named_weights(model)), tensors, outline
    return adapters.weights(model), tensors | adapters.buffers(model), outline


def _parameter_names(model: "PreTrainedModel") -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
