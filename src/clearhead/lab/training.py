"""One training run, from a preset or from a trained model."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import prepare, with_mask_token
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.lab import run_setup
from clearhead.lab.configs import TrainJob
from clearhead.models import BASELINE, preset
from clearhead.models.inspection import parameter_count
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import best_device
from clearhead.models.starts import check_baseline
from clearhead.optim import learning_rate
from clearhead.records.identity import canonical, differences, restored
from clearhead.records.lock import hold_folder
from clearhead.terminal import say
from clearhead.train import Progress, TrainResult, checkpoint, make_trackers, train
from clearhead.train.run_dir import FREE_KEYS, read_record, require_no_run, require_run
from clearhead.train.world import World, joined

_OF_THE_RUN = ("output", "train", "resume")  # of a job: not among the settings that a run keeps


def run_training(job: TrainJob) -> TrainResult:
    """Train the model of a job, or go on with the run in its output folder where `job.resume` names
    it; OUTPUT/final is then a plain Hugging Face checkpoint."""
    with joined(job.train.timeout, alone=job.train.parallel != "fsdp") as world:
        return _run(job, world)


def _run(job: TrainJob, world: World) -> TrainResult:
    resume = job.resume is not None
    resumes = resume or world.restarted()  # in which all processes take part

    def check_folder() -> None:
        """Refuse a folder in use, and for a new run one with runs, before any text is read."""
        with hold_folder(job.output):
            if not resumes:
                require_no_run(job.output)
                if any(job.output.glob("*seed*/run.json")):
                    raise ClearheadError(f"{job.output} holds the runs of another verb")

    world.by_first(check_folder)
    began = run_setup.data_of(job.output) if resume else None
    start: dict[str, Any] = {"preset": job.preset, "from": None}
    if job.base is None:
        start |= {"preset": job.preset or BASELINE, "size": job.size}
        model, corpus = world.in_turn(lambda: _new(job, start["preset"], began))
    else:
        named: Any = (job.base, job.data, job.train.sequence_length)
        options: Any = {"trust_remote_code": job.trust_remote_code, "began": began}
        base = world.in_turn(lambda: run_setup.open_base(*named, **options))
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
                began_with = f"the run in {job.output} started from ({first.get('name')})"
                raise ClearheadError(f"{job.base} has other weights than {began_with}")
        elif remark := run_setup.resting_sinks(model, job.train):
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
        read = run_setup.batches(corpus, job.train, job.output, masked=masked)
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


def _new(job: TrainJob, name: str, began: str | None) -> tuple[Any, Any]:
    """A preset with fresh weights, and its text; `began`: fingerprint of a begun run's text."""
    config = preset(name, job.size, **job.set)  # refuses before anything is read
    corpus = prepare(job.data, progress=say, began=began)
    if run_setup.objective_of(config) == "mlm":
        corpus = with_mask_token(corpus)
    config = run_setup.fitted(name, job.size, corpus, job.train, **job.set)
    torch.manual_seed(job.train.seed)
    model = run_setup.new_model(config)
    run_setup.check_length(model, name, job.train.sequence_length)
    return model, corpus


def recorded(output: Path) -> TrainJob:
    """The job whose run is in `output`, with the settings that it has now; raises a ClearheadError
    where there is none, or no `run_training` of this version began it."""
    require_run(output)
    record = read_record(output)
    try:
        names = {one.name for one in fields(TrainJob)}
        settings = {key: x for key, x in record["description"]["job"].items() if key in names}
        return replace(restored(TrainJob, settings | {"train": record["config"]}), output=output)
    except (KeyError, TypeError):
        own = f"give its own command again, {str(record.get('command'))!r}"
        raise ClearheadError(f"{output} is not of this version's clearhead train: {own}") from None


def extended(job: TrainJob, begun: TrainJob) -> TrainJob:
    """The begun run with what `job` may change of it; another change is refused by its option."""
    free = {f"--train.{key.replace('_', '-')}" for key in FREE_KEYS | {"tokens"}}
    free |= {"--track", "--resume", "--data.cache", "--trust-remote-code"}
    # The same content may lie elsewhere: its fingerprint is compared, not its place.
    free |= {"--data.data", "--data.tokenizer"} | ({"--from"} if begun.base else set())
    own = {"preset": "preset", "base": "--from", "set": "--set"}  # of a field; others have its name
    names = [name for name, _, _ in differences(canonical(begun), canonical(job))]
    changed = {own.get(one.split(".")[0], f"--{one.replace('_', '-')}") for one in names}
    if fixed := sorted(changed - free):
        raise ClearheadError(f"leave out {', '.join(fixed)}, or start another run")
    if job.train.tokens == begun.train.tokens:
        return job
    planned = begun.train.schedule_tokens or begun.train.tokens
    return replace(job, train=replace(job.train, schedule_tokens=planned))
