"""One run of a comparison: an arm with a seed, trained, measured, and recorded in its folder."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import Corpus, windows
from clearhead.errors import ClearheadError
from clearhead.experiments.arms import Arm
from clearhead.experiments.bases import ArmModel
from clearhead.experiments.configs import RECORDS, CompareConfig, OneRun, milestone_steps
from clearhead.experiments.final_measures import (
    MILESTONES,
    Milestones,
    measure,
)
from clearhead.experiments.jobs import Job
from clearhead.experiments.run_setup import batches, masked_batches
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.records.provenance import KEYS
from clearhead.train import Callback, DivergedError, TrainResult, precision, train_to_end
from clearhead.train.callbacks import METRICS
from clearhead.train.run_dir import read_record, refuse_changes
from clearhead.train.trainable import choose_parameters

UNTIMED = "the process that trained it was stopped before the measurements"
# Of a run's header: what another request must have alike to take its records.
_SETTINGS = (
    *("size", "from", "model", "train", "lengths", "evaluation_tokens", "measure_every"),
    *("documents", "held_out"),
)


def folder_of(config: CompareConfig, arm: Arm, seed: int) -> Path:
    """The folder of a run."""
    return config.output / f"{arm.folder}-seed{seed}"


class Run:
    """One run: an arm with a seed."""

    def __init__(
        self, config: CompareConfig, corpus: Corpus, arm: Arm, seed: int, model: ArmModel
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.arm = arm
        self.seed = seed
        # As it will be computed: the header of a record has no "auto".
        resolved = precision.resolve(arm.train.precision, best_device())
        self.settings = replace(arm.train, seed=seed, precision=resolved)
        self.model = model
        if config.measure_every and arm.train.parallel == "fsdp":
            raise ClearheadError(
                "measure_every needs the whole model in one process: choose parallel ddp"
            )
        self.folder = folder_of(config, arm, seed)
        self.records = self.folder / RECORDS
        self.called = f"{arm.name}, seed {seed}"
        self.header = self._header()

    def of_a_process(self) -> Job:
        """The run as a job of a process of its own."""
        return Job(
            name=self.folder.name,
            config=OneRun(comparison=self.config, arm=self.arm.name, seed=self.seed),
            records=self.records,
            arm=self.arm.name,
            label=self.config.label,
        )

    def _header(self) -> dict[str, Any]:
        """The run's own line of the records; what a training run adds to it comes later."""
        length = self.settings.sequence_length
        return {
            "kind": "run",
            "run": f"{self.arm.name}/seed{self.seed}",
            "arm": self.arm.name,
            "preset": self.arm.preset,
            "changes": self.arm.changes,
            "size": self.config.size if self.model.origin is None else "",
            "from": self.model.origin,
            "seed": self.seed,
            "label": self.config.label,
            "model": self.model.outline.config.to_diff_dict(),
            "train": asdict(self.settings),
            "data": self.corpus.describe(),
            **self.model.counts,
            "objective": self.config.objective,
            "lengths": [multiple * length for multiple in self.config.lengths],
            "evaluation_tokens": self.config.evaluation_tokens,
            "measure_every": milestone_steps(self.config.measure_every, self.settings),
            "documents": self.config.documents,
            "held_out": self.config.held_out,
        }


def check_optimizer(job: Run) -> None:
    """Refuse one whose library is missing, or whose patterns match nothing."""
    model = copy.deepcopy(job.model.outline)
    try:
        choose_parameters(model, job.settings)
        build_optimizer(model, job.settings)
    except ClearheadError as error:
        raise ClearheadError(f"{job.arm.name}: {error}") from error


def check_text(job: Run) -> None:
    """Refuse a text that holds out too little for what is measured after the training."""
    if job.header["lengths"] or job.header["measure_every"]:
        windows(job.corpus, length=job.settings.sequence_length, count=1)


@dataclass(frozen=True)
class Trained:
    """The model of a run, what its training took where that is known, and how it diverged."""

    model: Any
    result: TrainResult | None
    diverged: str | None = None


def train_one(job: Run, callbacks: list[Callback]) -> Trained:
    """Train one model, or resume it."""
    settings, corpus, folder = job.settings, job.corpus, job.folder
    name, every = job.header["run"], job.header["measure_every"]
    torch.manual_seed(job.seed)
    model = job.model.build().to(best_device())
    if every:
        apart = job.config.documents == "apart"
        followed = Milestones(corpus, settings, every=every, documents_apart=apart)
        callbacks = [*callbacks, followed]
    made = masked_batches if job.config.objective == "mlm" else batches
    result = diverged = None
    try:
        model, result = train_to_end(
            model,
            made(corpus, settings, folder),
            settings,
            output=folder,
            tokenizer=corpus.tokenizer,
            callbacks=callbacks,
            description={"run": name, "data": job.header["data"]},
        )
    except DivergedError as error:
        diverged = str(error)
    return Trained(model, result, diverged)


def write_records(job: Run, trained: Trained) -> None:
    """Measure a trained model; publish the run's records."""
    write_text(job.records, "".join(map(jsonl.encode, _records(job, trained))))


def _records(job: Run, trained: Trained) -> Iterator[dict[str, Any]]:
    """Measure a trained model; yields the run's records."""
    settings, corpus, folder = job.settings, job.corpus, job.folder
    name, every = job.header["run"], job.header["measure_every"]
    diverged, measured = trained.diverged, {"kind": "measure", "run": name}
    apart = job.config.documents == "apart"
    record = read_record(folder)
    yield job.header | {key: record[key] for key in KEYS if key in record} | {"diverged": diverged}
    for line in jsonl.steps(folder / METRICS):
        yield line | {"kind": "step", "run": name}
    if every:
        yield from jsonl.steps(folder / MILESTONES)
    for metric in ("seconds", "tokens_per_second", "peak_memory_bytes"):
        value = getattr(trained.result, metric, None)
        reason = {} if value is not None else {"reason": diverged or UNTIMED}
        metric = "train_seconds" if metric == "seconds" else metric
        yield {**measured, "metric": metric, "value": value, **reason}
    lengths = job.header["lengths"]
    if diverged is not None:
        for length in lengths:
            none = {"metric": "perplexity", "length": length, "value": None}
            yield {**measured, **none, "reason": diverged}
    if diverged is not None or not lengths:
        return
    tokens = job.config.evaluation_tokens
    for found in measure(
        trained.model, corpus, settings, lengths=lengths, tokens=tokens, documents_apart=apart
    ):
        yield {**measured, **found}


def header_of(path: Path) -> dict[str, Any]:
    """The header of a finished run's records.

    Raises:
        ClearheadError: naming the file, where it is damaged.
    """
    advice = "restore it, or delete it to have the trained model measured again"
    try:
        (run,) = load(path).runs
    except ClearheadError as error:
        raise ClearheadError(f"{error}: {advice}") from error
    except ValueError as error:
        raise ClearheadError(f"{path} holds no run, or several: {advice}") from error
    return run.header


def check_same(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse a folder whose finished run was made with other settings."""
    asked, wanted = (
        {key: one.get(key) for key in _SETTINGS}
        | {"data": {"fingerprint": (one.get("data") or {}).get("fingerprint")}}
        for one in (found, header)
    )
    refuse_changes(path.parent, asked, wanted)
