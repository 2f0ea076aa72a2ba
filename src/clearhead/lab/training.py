"""One training run, from a preset or from a trained model."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from clearhead.data import prepare, with_mask_token
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.lab.bases import open_base, resting_sinks
from clearhead.lab.configs import TrainJob
from clearhead.lab.run_setup import (
    OBJECTIVES,
    batches,
    check_room,
    data_of,
    fitted,
    masked_batches,
    objective_of,
)
from clearhead.models import BASELINE, preset
from clearhead.models.inspection import parameter_count
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import best_device
from clearhead.models.starts import check_baseline
from clearhead.optim import learning_rate
from clearhead.records.identity import canonical, restored
from clearhead.records.lock import hold_folder
from clearhead.terminal import say
from clearhead.train import Progress, TrainResult, checkpoint, make_trackers, train
from clearhead.train.run_dir import read_record, require_no_run
from clearhead.train.world import World, joined

J = TypeVar("J", bound=TrainJob)


def run_training(job: TrainJob, *, resume: bool) -> TrainResult:
    """Train the model of a job; OUTPUT/final is then a plain Hugging Face checkpoint.

    Args:
        resume: go on with the run in the output folder.

    Raises:
        ClearheadError: as `clearhead.train.train`; for a preset, a model to start from or a text
            that do not work.
    """
    with joined(job.train.timeout, alone=job.train.parallel != "fsdp") as world:
        return _run(job, world, resume=resume)


def _run(job: TrainJob, world: World, *, resume: bool) -> TrainResult:
    resumes = resume or world.restarted()
    world.by_first(lambda: _check_folder(job.output, resumes))
    start: dict[str, Any] = {"preset": job.preset, "from": None}
    began = data_of(job.output) if resume else None
    if job.base is None:
        model, corpus = world.in_turn(lambda: _new(job, began))
        start |= {"preset": job.preset or BASELINE, "size": job.size}
    else:
        source, length, trust = job.base, job.train.sequence_length, job.trust_remote_code
        base = world.in_turn(
            lambda: open_base(source, job.data, length, trust_remote_code=trust, began=began)
        )
        corpus = base.corpus
        if isinstance(base.model, ClearheadForCausalLM):
            check_baseline(job.preset, job.set, base.model.config)
        begun = base.start(job.preset, job.set)
        model = begun.model
        for line in begun.in_words():
            say(line)
        if not resume and (remark := resting_sinks(model, job.train)):
            say(remark)
        start["from"] = base.describe()
        if resume:
            _check_start(job, start["from"])
    say(f"{job.preset or job.base or BASELINE}: {parameter_count(model):,} parameters")
    planned = job.train.schedule_tokens
    if resume and planned is not None and planned < job.train.tokens:
        rate = learning_rate(job.train.steps - 1, job.train)
        say(
            f"extended to {job.train.tokens:,} tokens: after the {planned:,} of its schedule the "
            f"learning rate stays at {rate:g} (for another warmup: train --from {job.output})"
        )
    torch.manual_seed(job.train.seed)
    with world.together():
        masked = getattr(model, "objective", "") == "mlm"
        made = (masked_batches if masked else batches)(corpus, job.train, job.output)
    return train(
        model.to(best_device()),
        made,
        job.train,
        output=job.output,
        tokenizer=corpus.tokenizer,
        resume=resume,
        callbacks=[Progress(), *make_trackers(job.track)],
        description={
            **start,
            "objective": "mlm" if masked else "next-token",
            "mask": SHARE if masked else None,
            "data": corpus.describe(),
            "job": {
                key: value
                for key, value in canonical(job).items()
                if key not in ("output", "train", "resume")
            },
        },
    )


def _check_folder(output: Path, resumes: bool) -> None:
    """Refuse a folder in use, or for a new run one that holds runs, before any text is read."""
    with hold_folder(output):
        if resumes:
            return
        require_no_run(output)
        if any(output.glob("*seed*/run.json")):
            raise ClearheadError(
                f"{output} holds the runs of a comparison or a fine-tuning: choose another folder"
            )


def recorded(kind: type[J], output: Path) -> J:
    """The job of a `kind` whose run is in `output`, with the settings that it has now.

    Raises:
        ClearheadError: as `read_record`; where no `run_training` of this version began it.
    """
    record = read_record(output)
    try:
        begun = record["description"]["job"].items()
        settings = {key: one for key, one in begun if key in kind.__dataclass_fields__}
        settings["train"] = record["config"]
        return replace(restored(kind, settings), output=output)
    except (KeyError, TypeError):
        raise ClearheadError(
            f"the run in {output} was not begun by clearhead train, or by an earlier version: to "
            f"go on with it give its own command again, {str(record.get('command'))!r}, or start "
            "another run"
        ) from None


def _new(job: TrainJob, began: str | None) -> tuple[Any, Any]:
    """A preset with fresh weights, and its text, with which a run may have begun."""
    name = job.preset or BASELINE
    config = preset(name, job.size, **job.set)  # refuses before anything is read
    corpus = prepare(job.data, progress=say, began=began)
    if (objective := objective_of(config)) == "mlm":
        corpus = with_mask_token(corpus)
    config = fitted(name, job.size, corpus, job.train, **job.set)
    check_room(config, job.train)
    torch.manual_seed(job.train.seed)
    return OBJECTIVES[objective](config), corpus


def _check_start(job: TrainJob, start: dict[str, str]) -> None:
    """Refuse to go on from other weights than the run began with, where it still reads them."""
    began = read_record(job.output)["description"].get("from") or {}
    reads = job.train.lora or checkpoint.newest(job.output) is None
    reads = reads or job.base != began.get("name")
    if reads and began.get("parameters") != start["parameters"]:
        raise ClearheadError(
            f"{job.base} has other weights than the run in {job.output} started from "
            f"({began.get('name')}): restore them, or start another run"
        )
