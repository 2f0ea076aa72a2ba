"""A comparison: every arm is trained on the same tokens in the same order and measured alike.

OUTPUT/ARM-seedN/                a run's folder (`clearhead.train.run_dir`)
OUTPUT/ARM-seedN/records.jsonl   its records, published whole
OUTPUT/records.jsonl             the records of all finished runs
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import Corpus, prepare, windows, with_mask_token
from clearhead.errors import ClearheadError
from clearhead.lab import processes
from clearhead.lab.arms import Arm
from clearhead.lab.bases import ArmModel, Base, open_base
from clearhead.lab.configs import RECORDS, CompareConfig, Job, OneRun, milestone_steps
from clearhead.lab.final_measures import MILESTONES, Milestones, measure
from clearhead.lab.run_setup import batches, data_of, masked_batches
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.records.lock import hold_folder
from clearhead.records.provenance import KEYS
from clearhead.records.runs import Records
from clearhead.terminal import say
from clearhead.train import (
    DivergedError,
    Progress,
    TrainResult,
    make_trackers,
    precision,
    train_to_end,
)
from clearhead.train.callbacks import METRICS
from clearhead.train.run_dir import read_record, refuse_changes, require_no_run
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
        self.folder = folder_of(config, arm, seed)
        self.records = self.folder / RECORDS
        self.called = f"{arm.name}, seed {seed}"
        self.header = self._header()

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
            try:
                (run,) = load(self.records).runs
            except (ClearheadError, ValueError) as error:
                raise ClearheadError(
                    f"{self.records} is damaged ({error}): restore it, or delete it to have the "
                    "trained model measured again"
                ) from error
            before, wanted = (
                {key: one.get(key) for key in _SETTINGS}
                | {"data": {"fingerprint": (one.get("data") or {}).get("fingerprint")}}
                for one in (run.header, self.header)
            )
            refuse_changes(self.folder, before, wanted)
            return
        model = copy.deepcopy(self.model.outline)
        try:
            choose_parameters(model, self.settings)
            build_optimizer(model, self.settings)
        except ClearheadError as error:
            raise ClearheadError(f"{self.arm.name}: {error}") from error
        if self.header["lengths"] or self.header["measure_every"]:
            windows(self.corpus, length=self.settings.sequence_length, count=1)

    def make(self, work: Work) -> None:
        """Train the model, or resume it; measure it, and publish the records."""
        work.begin(f"{self.called}, {self.header['parameters']:,} parameters")
        callbacks = [Progress(work=work), *make_trackers(self.config.track)]
        every = self.header["measure_every"]
        torch.manual_seed(self.seed)
        model = self.model.build().to(best_device())
        if every:
            apart = self.config.documents == "apart"
            followed = Milestones(self.corpus, self.settings, every=every, documents_apart=apart)
            callbacks = [*callbacks, followed]
        batched = masked_batches if self.config.objective == "mlm" else batches
        result = diverged = None
        try:
            model, result = train_to_end(
                model,
                batched(self.corpus, self.settings, self.folder),
                self.settings,
                output=self.folder,
                tokenizer=self.corpus.tokenizer,
                callbacks=callbacks,
                description={"run": self.header["run"], "data": self.header["data"]},
            )
        except DivergedError as error:
            diverged = str(error)
        lines = self._lines(model, result, diverged)
        write_text(self.records, "".join(map(jsonl.encode, lines)))

    def _lines(
        self, model: Any, result: TrainResult | None, diverged: str | None
    ) -> Iterator[dict[str, Any]]:
        name, lengths = self.header["run"], self.header["lengths"]
        measured, record = {"kind": "measure", "run": name}, read_record(self.folder)
        origin = {key: record[key] for key in KEYS if key in record}
        yield self.header | origin | {"diverged": diverged}
        for line in jsonl.steps(self.folder / METRICS):
            yield line | {"kind": "step", "run": name}
        if self.header["measure_every"]:
            yield from jsonl.steps(self.folder / MILESTONES)
        for metric in ("seconds", "tokens_per_second", "peak_memory_bytes"):
            value = getattr(result, metric, None)
            reason = {} if value is not None else {"reason": diverged or UNTIMED}
            metric = "train_seconds" if metric == "seconds" else metric
            yield {**measured, "metric": metric, "value": value, **reason}
        if diverged is not None:
            none = {"metric": "perplexity", "value": None, "reason": diverged}
            yield from ({**measured, **none, "length": length} for length in lengths)
        elif lengths:
            options = {"lengths": lengths, "tokens": self.config.evaluation_tokens}
            apart = self.config.documents == "apart"
            for found in measure(
                model, self.corpus, self.settings, documents_apart=apart, **options
            ):
                yield {**measured, **found}


def compare(config: CompareConfig, *, work: Work | None = None) -> Records:
    """Train and measure every arm with every seed, and return the records.

    What is done is kept in `config.output`, a folder a run, so that a comparison that was stopped
    goes on with the run at hand. `records.jsonl` there holds the records of all runs. A run that
    diverges is recorded as such, and the others go on: in a sweep that is a result. A script that
    asks for several `jobs` has its code under `if __name__ == "__main__"`, as multiprocessing wants
    it.

    Args:
        work: shows which run is at hand and how far it is, a unit a run.

    Raises:
        ClearheadError: for settings or data that do not work, a folder of other settings, in use
            or damaged, or where every run diverged.
        InterruptedRun: after SIGINT or SIGTERM, once the run at hand has saved.
        Stopped: the same, of several runs at once.
    """
    config.check()
    work = Work(say=say) if work is None else work
    require_no_run(config.output)
    with hold_folder(config.output):
        runs, records = _runs(config), config.output / RECORDS
        for run in runs:  # all before the first is trained, which may take hours
            run.check()
        waiting = [run for run in runs if not run.records.exists()]
        work.start(len(runs))
        for run in (run for run in runs if run not in waiting):
            work.skip()
            say(f"{run.called}: already done")
        if config.jobs > 1 and waiting:
            _side_by_side(waiting, config, work)
        else:
            for run in waiting:
                run.make(work)
                _join(runs, records)
                work.end()
        _join(runs, records)
        done = load(records)
        for one in (one for one in done.runs if one.diverged):
            say(f"{one.arm}, seed {one.seed}: {one.header['diverged']}")
        if all(one.diverged for one in done.runs):
            raise DivergedError(f"no run stayed finite: {done.runs[0].header['diverged']}")
        return done


def _runs(config: CompareConfig) -> list[Run]:
    """Every arm with every seed; one seed of all arms comes before the next."""
    base, corpus = _opened(config)
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" * (len(unseen) > 3))
        say(f"nothing is held out of {named}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    models = {arm.name: ArmModel.of(arm, config, corpus, base) for arm in config.arms}
    for remark in filter(None, (model.remark for model in models.values())):
        say(remark)
    return [
        Run(config, corpus, arm, seed, models[arm.name])
        for seed in config.seeds
        for arm in config.arms
    ]


def _join(runs: list[Run], records: Path) -> None:
    """Join the records of the runs that are done."""
    done = (run.records.read_bytes().decode() for run in runs if run.records.exists())
    write_text(records, "".join(done))


def _side_by_side(runs: list[Run], config: CompareConfig, work: Work) -> None:
    """Make runs in processes, so many at a time; refuse to go on without those that failed."""
    count, logs = min(config.jobs, len(runs)), config.output / "logs"
    say(f"{count} of {len(runs)} runs at once, with logs in {logs}")
    jobs = [
        Job(
            name=one.folder.name,
            config=OneRun(comparison=config, arm=one.arm.name, seed=one.seed),
            records=one.records,
        )
        for one in runs
    ]
    if failed := processes.run(jobs, logs=logs, jobs=count, work=work):
        raise ClearheadError(
            f"{len(failed)} of {len(runs)} runs failed ({', '.join(one.name for one in failed)}): "
            f"{logs} says why, and the same command tries them again"
        )


def make_run(one: OneRun, *, work: Work) -> None:
    """Train, measure and record one run of a comparison, whose folder another process holds."""
    config = one.comparison
    base, corpus = _opened(config)
    arm = next(arm for arm in config.arms if arm.name == one.arm)
    work.start(1)
    Run(config, corpus, arm, one.seed, ArmModel.of(arm, config, corpus, base)).make(work)


def _opened(config: CompareConfig) -> tuple[Base | None, Corpus]:
    """The trained model to start from, where one is named; and the text."""
    # The fingerprint of the data of a run that was begun in the output folder, if one was.
    runs = itertools.product(config.arms, config.seeds)
    began = next(filter(None, (data_of(folder_of(config, *run)) for run in runs)), None)
    base = None
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        corpus = with_mask_token(corpus) if config.objective == "mlm" else corpus
    else:
        longest = max(arm.train.sequence_length for arm in config.arms)
        trust = config.trust_remote_code
        base = open_base(
            *(config.base, config.data, longest), trust_remote_code=trust, began=began, alike=True
        )
        corpus = base.corpus
    return base, corpus.for_tuning() if config.held_out == "training" else corpus
