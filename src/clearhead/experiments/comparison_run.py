"""One run of a comparison: an arm with a seed, trained, measured, and recorded in its folder."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Trained(NamedTuple):
    """The model of a run, what its training took where that is known, and how it diverged."""

    model: Any
    result: TrainResult | None
    diverged: str | None = None


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

    def check(self) -> None:
        """Refuse what training or measuring would refuse only hours later, and a folder whose
        finished run was made with other settings."""
        if self.records.exists():
            found, wanted = (
                {key: one.get(key) for key in _SETTINGS}
                | {"data": {"fingerprint": (one.get("data") or {}).get("fingerprint")}}
                for one in (header_of(self.records), self.header)
            )
            refuse_changes(self.folder, found, wanted)
            return
        model = copy.deepcopy(self.model.outline)
        try:
            choose_parameters(model, self.settings)
            build_optimizer(model, self.settings)
        except ClearheadError as error:
            raise ClearheadError(f"{self.arm.name}: {error}") from error
        if self.header["lengths"] or self.header["measure_every"]:
            windows(self.corpus, length=self.settings.sequence_length, count=1)

    def train(self, callbacks: list[Callback]) -> Trained:
        """Train the model, or resume it."""
        every = self.header["measure_every"]
        torch.manual_seed(self.seed)
        model = self.model.build().to(best_device())
        if every:
            apart = self.config.documents == "apart"
            followed = Milestones(self.corpus, self.settings, every=every, documents_apart=apart)
            callbacks = [*callbacks, followed]
        made = masked_batches if self.config.objective == "mlm" else batches
        try:
            model, result = train_to_end(
                model,
                made(self.corpus, self.settings, self.folder),
                self.settings,
                output=self.folder,
                tokenizer=self.corpus.tokenizer,
                callbacks=callbacks,
                description={"run": self.header["run"], "data": self.header["data"]},
            )
        except DivergedError as error:
            return Trained(model, None, str(error))
        return Trained(model, result)

    def record(self, trained: Trained) -> None:
        """Measure the trained model; publish the run's records."""
        write_text(self.records, "".join(map(jsonl.encode, self._lines(trained))))

    def _lines(self, trained: Trained) -> Iterator[dict[str, Any]]:
        name, lengths = self.header["run"], self.header["lengths"]
        diverged, measured = trained.diverged, {"kind": "measure", "run": name}
        record = read_record(self.folder)
        made = {key: record[key] for key in KEYS if key in record}
        yield self.header | made | {"diverged": diverged}
        for line in jsonl.steps(self.folder / METRICS):
            yield line | {"kind": "step", "run": name}
        if self.header["measure_every"]:
            yield from jsonl.steps(self.folder / MILESTONES)
        for metric in ("seconds", "tokens_per_second", "peak_memory_bytes"):
            value = getattr(trained.result, metric, None)
            reason = {} if value is not None else {"reason": diverged or UNTIMED}
            metric = "train_seconds" if metric == "seconds" else metric
            yield {**measured, "metric": metric, "value": value, **reason}
        if diverged is not None:
            for length in lengths:
                none = {"metric": "perplexity", "length": length, "value": None}
                yield {**measured, **none, "reason": diverged}
        if diverged is not None or not lengths:
            return
        for found in measure(
            trained.model,
            self.corpus,
            self.settings,
            lengths=lengths,
            tokens=self.config.evaluation_tokens,
            documents_apart=self.config.documents == "apart",
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
