"""One training run, from a preset or from a trained model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import prepare, with_mask_token
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.lab.bases import open_base, resting_sinks
from clearhead.lab.configs import TrainJob
from clearhead.lab.run_setup import batches, check_length, data_of, fitted, new_model, objective_of
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

_OF_THE_RUN = ("output", "train", "resume")  # of a job: not among the settings that a run keeps


def run_training(job: TrainJob) -> TrainResult:
    """Train the model of a job, or go on with the run in its output folder where `job.resume` names
    it; OUTPUT/final is then a plain Hugging Face checkpoint.

    Raises:
        ClearheadError: as `clearhead.train.train`; for a preset, a model to start from or a text
            that do not work.
    """
    with joined(job.train.timeout, alone=job.train.parallel != "fsdp") as world:
        return _run(job, world)


def _run(job: TrainJob, world: World) -> TrainResult:
    resume = job.resume is not None
    resumes = resume or world.restarted()  # in which all processes take part
    world.by_first(lambda: _check_folder(job.output, resumes))
    name, began = job.preset or BASELINE, data_of(job.output) if resume else None
    start: dict[str, Any] = {"preset": job.preset, "from": None}
    if job.base is None:
        model, corpus = world.in_turn(lambda: _new(job, name, began))
        start = {"preset": name, "from": None, "size": job.size}
    else:
        named: Any = (job.base, job.data, job.train.sequence_length)
        trust = job.trust_remote_code
        base = world.in_turn(lambda: open_base(*named, trust_remote_code=trust, began=began))
        corpus, start["from"] = base.corpus, base.origin
        if isinstance(base.model, ClearheadForCausalLM):
            check_baseline(job.preset, job.set, base.model.config)
        begun = base.start(job.preset, job.set)
        model = begun.model
        for line in begun.in_words():
            say(line)
        if resume:  # where it still reads the weights that it began with
            first = read_record(job.output)["description"].get("from") or {}
            reads = job.train.lora or checkpoint.newest(job.output) is None
            reads = reads or job.base != first.get("name")
            if reads and first.get("parameters") != base.origin["parameters"]:
                raise ClearheadError(
                    f"{job.base} has other weights than the run in {job.output} started from "
                    f"({first.get('name')}): restore them, or start another run"
                )
        elif remark := resting_sinks(model, job.train):
            say(remark)
    say(f"{job.preset or job.base or BASELINE}: {parameter_count(model):,} parameters")
    planned = job.train.schedule_tokens
    if resume and planned is not None and planned < job.train.tokens:
        rate = learning_rate(job.train.steps - 1, job.train)
        say(
            f"extended to {job.train.tokens:,} tokens: after the {planned:,} of its schedule the "
            f"learning rate stays at {rate:g} (for another warmup: train --from {job.output})"
        )
    torch.manual_seed(job.train.seed)
    masked = getattr(model, "objective", "") == "mlm"
    with world.together():
        read = batches(corpus, job.train, job.output, masked=masked)
    return train(
        model.to(best_device()),
        read,
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
            "job": {k: x for k, x in canonical(job).items() if k not in _OF_THE_RUN},
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


def recorded(output: Path) -> TrainJob:
    """The job whose run is in `output`, with the settings that it has now; raises a ClearheadError
    where there is none, or no `run_training` of this version began it."""
    record = read_record(output)
    try:
        begun = record["description"]["job"].items()
        settings = {key: one for key, one in begun if key in TrainJob.__dataclass_fields__}
        return replace(restored(TrainJob, settings | {"train": record["config"]}), output=output)
    except (KeyError, TypeError):
        raise ClearheadError(
            f"the run in {output} was not begun by clearhead train, or by an earlier version: to "
            f"go on with it give its own command again, {str(record.get('command'))!r}, or start "
            "another run"
        ) from None


def _new(job: TrainJob, name: str, began: str | None) -> tuple[Any, Any]:
    """A preset with fresh weights, and its text; `began`: fingerprint of a begun run's text."""
    config = preset(name, job.size, **job.set)  # refuses before anything is read
    corpus = prepare(job.data, progress=say, began=began)
    if objective_of(config) == "mlm":
        corpus = with_mask_token(corpus)
    config = fitted(name, job.size, corpus, job.train, **job.set)
    torch.manual_seed(job.train.seed)
    model = new_model(config)
    check_length(model, name, job.train.sequence_length)
    return model, corpus
