"""The run folder: what a run was asked for, and whether it may go on.

OUTPUT/run.json         settings, seed and provenance
OUTPUT/metrics.jsonl    one line a step
OUTPUT/checkpoints/     see `checkpoint`
OUTPUT/final/           model and tokenizer of the finished run, and their checksums
OUTPUT/.lock/           while a process writes here
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.records.files import read_json, remove_leftovers, write_json
from clearhead.records.provenance import provenance
from clearhead.train import checkpoint
from clearhead.train.config import Processes, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RUN_FILE = "run.json"
FINAL = "final"

# May change between a run and its resumption: no weight depends on them.
FREE_KEYS = {"save_every", "keep", "log_every", *(field.name for field in fields(Processes))}
# Settings that runs made before them had otherwise than today's default has it.
EARLIER = {"orthoadam": {"rotation_share": "size"}}
# Hugging Face fills these in on saving and loading; they say nothing about the architecture.
VOLATILE_KEYS = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}


def is_finished(output: Path) -> bool:
    """True if the run in `output` has done all its steps and saved its final model."""
    return (output / FINAL).is_dir()


def holds_run(output: Path) -> bool:
    """True if a run was begun in `output`: one killed before that left nothing to go on with."""
    return any((output / name).exists() for name in (RUN_FILE, checkpoint.FOLDER, FINAL))


def read_record(output: Path) -> dict[str, Any]:
    """Read the run.json in `output`.

    Raises:
        ClearheadError: where it is missing or damaged.
    """
    advice = "it no longer says what was asked for; restore it, or choose another folder"
    record = read_json(output / RUN_FILE, advice)
    sections = [record.get(key) for key in ("config", "model", "description")]
    if not all(isinstance(section, dict) for section in sections):
        raise ClearheadError(f"{output / RUN_FILE} is damaged: {advice}")
    return record


def identity(model: "PreTrainedModel", batches: Any, config: TrainConfig) -> dict[str, Any]:
    """All that a resumed run must share with the run it goes on with, as JSON values."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    found = {
        "config": asdict(config),
        "model": {key: value for key, value in settings.items() if key not in VOLATILE_KEYS},
        "data": getattr(batches, "fingerprint", None),
    }
    return json.loads(json.dumps(found))


def describe(model: "PreTrainedModel", name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """Where, when and by what a run was made. No path is in it that the user did not give."""
    return {
        "run": name,
        "description": dict(description),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **provenance(model.device),
    }


def begin(output: Path, record: dict[str, Any]) -> None:
    """Write the run.json of a new run into its folder, which this process holds.

    Raises:
        ClearheadError: where `output` holds a run, or cannot be written.
    """
    if holds_run(output):
        raise ClearheadError(
            f"{output} already holds a run: pass --resume (resume=True) to go on with it, "
            "or choose another folder"
        )
    remove_leftovers(output)
    write_json(output / RUN_FILE, record)


def reopen(output: Path, wanted: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any] | None:
    """Check that the run in `output` may go on as `wanted`, and note `origin` in its run.json.

    Returns:
        The record of the newest checkpoint, verified; None where the run was killed before its
        first, and starts over.

    Raises:
        ClearheadError: where there is no run, where it is finished, where its newest checkpoint
            is damaged, or where it was asked for something else, naming each difference.
    """
    if not holds_run(output):
        raise ClearheadError(f"{output} holds no run to resume: start it without --resume")
    if is_finished(output):
        raise ClearheadError(
            f"the run in {output} is finished: its model is in {output / FINAL}; "
            "choose another folder to train again"
        )
    record = read_record(output)
    newest = checkpoint.newest(output)
    saved = checkpoint.verify(newest) if newest else None
    _refuse_changes(output, record if saved is None else saved, wanted)
    remove_leftovers(output)
    remove_leftovers(output / checkpoint.FOLDER)
    resumed = {"step": saved["step"] if saved else 0, **origin}
    write_json(output / RUN_FILE, {**record, "resumed": [*record.get("resumed", []), resumed]})
    return saved


def with_newer_settings(asked: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an older record, "config" and "model", with defaults for those it lacks.

    A newer clearhead adds settings. Where a default changed what a run does, `EARLIER` has the
    older behaviour. Of other libraries' models no defaults are known: what is lacking is as wanted.
    """
    model = dict(wanted["model"])
    if model.get("model_type") == ClearheadConfig.model_type:
        model |= json.loads(ClearheadConfig().to_json_string(use_diff=False))
    settings = {**asdict(TrainConfig()), **EARLIER.get(wanted["config"].get("optimizer"), {})}
    settings = json.loads(json.dumps(settings))
    return {
        **asked,
        "config": {**settings, **asked["config"]},
        "model": {**model, **asked["model"]},
    }


def _refuse_changes(output: Path, asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    changes = []
    asked = with_newer_settings(asked, wanted)
    for section in ("config", "model"):
        # Settings that are no more cannot be compared.
        for key in sorted(wanted[section].keys() - FREE_KEYS - VOLATILE_KEYS):
            before, now = asked[section][key], wanted[section][key]
            if before != now:
                name = key if section == "config" else f"model {key}"
                changes.append(f"{name} was {before!r} and is now {now!r}")
    if asked.get("data") != wanted["data"]:
        changes.append(f"data fingerprint was {asked.get('data')} and is now {wanted['data']}")
    if changes:
        raise ClearheadError(
            f"cannot resume {output} with other settings: {'; '.join(changes)}; "
            "give those of the run, or choose another folder"
        )
