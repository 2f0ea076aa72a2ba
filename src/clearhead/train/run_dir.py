"""The run folder: the settings of a run, and the check of those that resume it.

OUTPUT/run.json         settings, seed and provenance
OUTPUT/metrics.jsonl    one line a step
OUTPUT/checkpoints/     see `checkpoint`
OUTPUT/final/           model and tokenizer of the finished run, and their checksums
OUTPUT/.lock            while a process writes here
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig, renamed
from clearhead.records.files import read_json, remove_leftovers, write_json
from clearhead.records.identity import canonical
from clearhead.records.provenance import KEYS, provenance
from clearhead.settings.train import TrainConfig
from clearhead.train import checkpoint

RUN_FILE = "run.json"
FINAL = "final"

# May change between a run and its resumption: no weight depends on them. The last two are of an
# earlier version.
FREE_KEYS = {"save_every", "keep", "log_every", "parallel", "checkpointing", "timeout"}
FREE_KEYS |= {"shard", "reshard"}
# Hugging Face fills these in on saving and loading; they say nothing about the architecture.
VOLATILE_KEYS = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}


def is_finished(output: Path) -> bool:
    """True if the run in `output` has done all its steps and saved its final model."""
    return (output / FINAL).is_dir()


def holds_run(output: Path) -> bool:
    """True if a run was begun in `output`, so that there is something to resume."""
    return any((output / name).exists() for name in (RUN_FILE, checkpoint.FOLDER, FINAL))


def read_record(output: Path) -> dict[str, Any]:
    """Read the run.json in `output`; a ClearheadError where it is missing or damaged."""
    if not holds_run(output):
        raise ClearheadError(f"{output} holds no run to resume: start it without --resume")
    advice = "it no longer says what was asked for; restore it, or choose another folder"
    record = read_json(output / RUN_FILE, advice)
    if not all(isinstance(record.get(key), dict) for key in ("config", "model", "description")):
        raise ClearheadError(f"{output / RUN_FILE} is damaged: {advice}")
    return record


def identity(model: PreTrainedModel, batches: Any, config: TrainConfig) -> dict[str, Any]:
    """Settings and fingerprints that a resumed run must share with its start, as JSON values."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings = {key: value for key, value in settings.items() if key not in VOLATILE_KEYS}
    data = getattr(batches, "fingerprint", None)
    return canonical({"config": asdict(config), "model": settings, "data": data})


def describe(model: PreTrainedModel, name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance of a run: machine, date, versions and command; no paths but the user's own."""
    parameters = list(model.parameters())
    return {
        "run": name,
        "description": dict(description),
        "parameters": sum([parameter.numel() for parameter in parameters]),
        "trainable_parameters": sum([p.numel() for p in parameters if p.requires_grad]),
        **provenance(model.device),
    }


def require_no_run(output: Path) -> None:
    """Raise a ClearheadError where a folder holds a run already."""
    if holds_run(output):
        raise ClearheadError(
            f"{output} already holds a run: go on with it by --resume {output} (resume=True), or "
            "choose another folder"
        )


def reopen(output: Path, record: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """Check that the run in `output` can be resumed with the settings of `record`, up to `steps`.

    They go to its run.json; a finished run keeps its present final model as final-STEP.

    Returns the record of the newest checkpoint, verified; None where the run starts over.
    """
    before = read_record(output)
    newest = checkpoint.newest(output)
    saved = checkpoint.verify(newest) if newest else None
    done = saved["step"] if saved else 0
    if is_finished(output) and (saved is None or done >= steps):
        raise ClearheadError(
            f"the run in {output} is finished: its model is in {output / FINAL}; extend it by more "
            "--train.tokens, or choose another folder to train again"
        )
    if done > steps:
        raise ClearheadError(
            f"{output} has done {done} steps, more than the {steps} that tokens pays for: raise it"
        )
    refuse_changes(output, comparable(saved or before), comparable(record))
    remove_leftovers(output / checkpoint.FOLDER)
    # A caller that describes nothing leaves what is known of the run as it was.
    keys = ("config", "description") if record["description"] else ("config",)
    now = {key: record[key] for key in keys}
    origin = {key: record[key] for key in (*KEYS, "processes") if key in record}
    resumed = [*before.get("resumed", []), {"step": done, **origin}]
    write_json(output / RUN_FILE, {**before, **now, "resumed": resumed})
    if is_finished(output):
        os.rename(output / FINAL, output / f"{FINAL}-{done:08d}")
    return saved


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that determine a run's weights, by section: its schedule, but not its length."""
    config = dict(record["config"])
    tokens = config.pop("tokens")
    config["schedule_tokens"] = config.get("schedule_tokens") or tokens
    return {"train": config, "model": record["model"], "data": {"fingerprint": record.get("data")}}


def refuse_changes(place: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to resume in `place` where its settings, as `recorded`, differ from those `wanted`,
    both JSON values by section. Keys that "model" lacks have clearhead's defaults, or count as
    equal in another library's model."""
    wanted = canonical(wanted)
    usual = dict(wanted.get("model", {}))
    if usual.get("model_type") == ClearheadConfig.model_type:
        usual |= json.loads(ClearheadConfig().to_json_string(use_diff=False))
    changes = []
    for section, now in wanted.items():
        before = recorded.get(section)
        pairs = [(section, before, now)]
        if isinstance(now, dict):
            before = usual | renamed(before or {}) if section == "model" else before or {}
            gone = before.keys() if section == "train" else ()  # settings of an earlier version
            keys = sorted({*now, *gone} - FREE_KEYS - VOLATILE_KEYS)
            pairs = [(f"{section}.{key}", before.get(key), now.get(key)) for key in keys]
        changes += [f"{name} was {a!r} and is now {b!r}" for name, a, b in pairs if a != b]
    if changes:
        raise ClearheadError(
            f"{place} holds a run of other settings: {'; '.join(changes)}; give those of the run, "
            "or choose another folder"
        )
