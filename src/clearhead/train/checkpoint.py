"""Checkpoints: whole or absent, safetensors only, and every byte of them vouched for.

OUTPUT/checkpoints/step-00000100/
    config.json, model.safetensors, …   what save_pretrained writes: loads with AutoModel
    tokenizer.json, …                   where a tokenizer was given
    optimizer.safetensors               optimizer state by parameter name, random state
    trainer.json                        step, settings, fingerprints, what of the optimizer is not
                                        a tensor, SHA-256 of each file
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from clearhead.errors import ClearheadError
from clearhead.models.loading import pretrained, without_bars
from clearhead.train import optimizer_state
from clearhead.train.atomic import publish_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "checkpoints"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"

# safetensors reports what the system refused as its own exception.
WRITE_ERRORS = (OSError, SafetensorError)


def folders(output: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    return sorted((output / FOLDER).glob("step-*"))


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
    try:
        with publish_folder(target) as folder:
            save_pretrained(model, tokenizer, folder)
            tensors, outline = optimizer_state.pack(_parameter_names(model), optimizer)
            save_file({**tensors, **_random_state(model.device)}, folder / OPTIMIZER_FILE)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            hashes = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
            # Through JSON and back, so that the digest is of what a reader will see.
            sealed = json.loads(json.dumps({**record, "optimizer": outline, "files": hashes}))
            write_json(folder / TRAINER_FILE, {**sealed, "sha256": _digest(sealed)})
    except WRITE_ERRORS as error:
        safe = f"the one before, {previous}, is whole" if previous else "there is none before it"
        raise ClearheadError(
            f"cannot write checkpoint {target} ({reason(error)}): {safe}; make room and resume"
        ) from error
    for old in folders(output)[:-keep]:
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
        ClearheadError: naming the first file that is missing, cut short or changed.
    """
    try:
        record = json.loads((folder / TRAINER_FILE).read_text(encoding="utf-8"))
        seal = record.pop("sha256")
        intact = _digest(record) == seal
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise _damaged(folder, TRAINER_FILE)
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            raise _damaged(folder, name)
    return record


def restore(folder: Path, model: "PreTrainedModel", optimizer: torch.optim.Optimizer) -> None:
    """Load weights, optimizer state and random state from a verified checkpoint, in place."""
    with without_bars():
        # Through from_pretrained, because only it knows each architecture's tied and renamed
        # weights; copied over, so that the optimizer still holds the same parameters.
        stored = pretrained(type(model), folder, dtype=torch.float32, local_files_only=True)
    model.load_state_dict(stored.state_dict())
    tensors = load_file(folder / OPTIMIZER_FILE)
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(record: dict[str, Any]) -> str:
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _damaged(folder: Path, name: str) -> ClearheadError:
    older = [path for path in folders(folder.parent.parent) if path.name < folder.name]
    start = older[-1].name if older else "the first step"
    return ClearheadError(
        f"{folder / name} is missing, cut short or changed: delete {folder} to resume from {start}"
    )


def reason(error: Exception) -> str:
    """Why a write failed, in the system's words."""
    return getattr(error, "strerror", None) or str(error)
