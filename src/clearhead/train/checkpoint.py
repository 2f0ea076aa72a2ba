"""Checkpoints: whole or absent, safetensors only, and every byte of them vouched for.

OUTPUT/checkpoints/step-00000100/
    config.json, model.safetensors, …   what save_pretrained writes: loads with AutoModel
    tokenizer.json, …                   where a tokenizer was given
    optimizer.safetensors               optimizer state by parameter name, random state
    trainer.json                        step, settings, fingerprints, what of the optimizer is not
                                        a tensor, SHA-256 of each file

Of a model with adapters it holds these alone (adapter_model.safetensors), not what they adapt.
"""

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from clearhead.models.loading import pretrained, without_bars
from clearhead.records import manifest
from clearhead.records.files import publish_folder
from clearhead.train import adapters, optimizer_state

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


def save(
    output: Path,
    *,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    optimizer: torch.optim.Optimizer,
    record: dict[str, Any],
    keep: int,
) -> Path:
    """Publish the checkpoint of step `record["step"]`, then delete all but the `keep` newest.

    Raises:
        ClearheadError: where it cannot be written, on a full disk for one; those before it are
            as they were.
    """
    target = output / FOLDER / f"step-{record['step']:08d}"
    previous = newest(output)
    safe = f"the one before, {previous}, is whole" if previous else "there is none before it"
    with publish_folder(target, f"{safe}; make room and resume") as folder:
        save_pretrained(model, tokenizer, folder)
        tensors, outline = optimizer_state.pack(_parameter_names(model), optimizer)
        tensors |= {**adapters.buffers(model), **_random_state(model.device)}
        save_file(tensors, folder / OPTIMIZER_FILE)
        manifest.seal(folder, {**record, "optimizer": outline}, name=TRAINER_FILE)
    for old in folders(output)[:-keep]:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
    return target


def save_pretrained(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: Path
) -> None:
    """Write model and tokenizer as an ordinary Hugging Face folder."""
    with without_bars():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its hash; return what trainer.json records.

    Raises:
        ClearheadError: as `manifest.verify`.
    """
    older = [path for path in folders(folder.parent.parent) if _step(path) < _step(folder)]
    start = older[-1].name if older else "the first step"
    advice = f"delete {folder} to resume from {start}"
    return manifest.verify(folder, name=TRAINER_FILE, advice=advice)


def restore(folder: Path, model: "PreTrainedModel", optimizer: torch.optim.Optimizer) -> None:
    """Load weights, optimizer state and random state from a verified checkpoint, in place."""
    tensors = load_file(folder / OPTIMIZER_FILE)
    if adapters.present(model):
        adapters.restore(folder, model, tensors)
    else:
        # Through from_pretrained, because only it knows each architecture's tied and renamed
        # weights; copied over, so that the optimizer still holds the same parameters.
        stored = pretrained(type(model), folder, dtype=torch.float32, local_files_only=True)
        model.load_state_dict(stored.state_dict())
    record = json.loads((folder / TRAINER_FILE).read_text(encoding="utf-8"))
    optimizer_state.unpack(_parameter_names(model), optimizer, tensors, record["optimizer"])
    torch.set_rng_state(tensors["random/cpu"].clone())
    if model.device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"].clone(), model.device)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _parameter_names(model: "PreTrainedModel") -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
