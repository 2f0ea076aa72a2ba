"""A comparison: every arm is trained on the same tokens in the same order and measured alike."""

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clearhead.data import Corpus, prepare, with_mask_token
from clearhead.errors import ClearheadError
from clearhead.experiments.arms import Arm
from clearhead.experiments.bases import ArmModel, Base, open_base
from clearhead.experiments.configs import RECORDS, CompareConfig, OneRun, milestone_steps
from clearhead.experiments.final_measures import (
    MILESTONES,
    Milestones,
    attention_records,
    measure,
)
from clearhead.experiments.forks import make_at_once
from clearhead.experiments.jobs import Job
from clearhead.experiments.run_setup import batches, data_of, masked_batches
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.records.loading import as_line, load
from clearhead.records.lock import Lock, hold_folder
from clearhead.records.provenance import KEYS
from clearhead.records.runs import Records
from clearhead.train import (
    Callback,
    DivergedError,
    Progress,
    make_trackers,
    train_to_end,
)
from clearhead.train.callbacks import METRICS
from clearhead.train.run_dir import read_record, refuse_changes
from clearhead.train.trainable import choose_parameters
from clearhead.train.world import World, joined

# Of a run's header: SHA-256 of the lines that follow it in the run's own file.
SEAL = "lines_sha256"
# Of a run's header: what another request must have alike to take its records.
_SETTINGS = (
    *("size", "from", "model", "train", "lengths", "evaluation_tokens", "measure_every"),
    "documents",
)


def compare(
    config: CompareConfig,
    *,
    say: Callable[[str], None],
    work: Work | None = None,
) -> Records:
    """Train and measure every arm with every seed, and return the records.

    What is done is kept in `config.output`, a folder a run, so that a comparison that was stopped
    goes on with the run at hand. `records.jsonl` there holds the records of all runs. A run that
    diverges is recorded as such, and the others go on: in a sweep that is a result. Processes that
    torchrun started train every run together; the first measures and writes. A script that asks for
    several `jobs` has its code under `if __name__ == "__main__"`, as multiprocessing wants it.

    Args:
        work: shows which run is at hand and how far it is, a unit a run.

    Raises:
        ClearheadError: for settings or data that do not work, a folder of other settings, in use
            or damaged, or where every run diverged.
        InterruptedRun: after SIGINT or SIGTERM, once the run at hand has saved.
        Stopped: the same, of several runs at once.
    """
    with joined(config.train.timeout) as world, ExitStack() as stack:
        locks = list[Lock]()  # of the first process
        hold = hold_folder(config.output)
        world.by_first(lambda: locks.append(stack.enter_context(hold)))
        return _compare(config, locks, world, say, Work(say=say) if work is None else work)


def _compare(
    config: CompareConfig,
    locks: list[Lock],
    world: World,
    say: Callable[[str], None],
    work: Work,
) -> Records:
    if config.jobs > 1 and world.size > 1:
        raise world.told(
            ClearheadError(
                "jobs gives every run a process, and torchrun gives one run several: leave one out"
            )
        )
    make_trackers(config.track)  # refuses one that is not installed
    base, corpus = world.in_turn(lambda: _opened(config, say))
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" * (len(unseen) > 3))
        say(f"nothing is held out of {named}: validation text has none of it")
    with world.alike():
        models = {arm.name: ArmModel.of(arm, config, corpus, base) for arm in config.arms}
        jobs = [
            _Job(config, corpus, arm, seed, models[arm.name])
            for seed in config.seeds
            for arm in config.arms
        ]

    def check() -> None:
        for job in jobs:  # all before the first, which may take hours
            if job.records.exists():
                _check_same(job.records, _intact(job.records), job.header)
            else:
                _check_optimizer(job)

    world.by_first(check)
    written, diverged = list[Path](), list[str | None]()

    def publish(job: _Job, trained: "_Trained | None") -> str | None:
        """Measure and record a run, unless that was done before; returns how it diverged."""
        if trained is not None:
            _write_records(job, trained, locks)
        written.append(job.records)
        text = "".join(path.read_bytes().decode() for path in written)
        write_text(config.output / RECORDS, text)
        return _intact(job.records).get("diverged")

    work.start(len(jobs))
    spread = list[_Job]()
    if config.jobs > 1:
        spread = [job for job in jobs if not job.records.exists()]
        for _ in range(len(jobs) - len(spread)):
            work.skip()
        make_at_once(config, [job.of_a_process() for job in spread], say, work)
    for job in jobs:
        trained = None
        if job in spread:
            pass  # said when its process ended
        elif world.by_first(job.records.exists):
            if config.jobs == 1:
                work.skip()
            say(f"{job.called}: already done")
        else:
            work.begin(f"{job.called}, {job.header['parameters']:,} parameters")
            trained = _trained(job, [Progress(work=work), *make_trackers(config.track)])
        diverged.append(world.by_first(partial(publish, job, trained)))
        if trained is not None:
            work.end()
        if diverged[-1]:
            say(f"{job.called}: {diverged[-1]}")
    if all(diverged):
        raise world.told(DivergedError(f"no run stayed finite: {diverged[0]}"))
    return load(config.output / RECORDS)


def make_run(one: OneRun, *, say: Callable[[str], None], work: Work) -> None:
    """Train, measure and record one run of a comparison, whose folder another process holds.

    Raises:
        ClearheadError, InterruptedRun: as `compare`.
    """
    config = one.comparison
    base, corpus = _opened(config, say)
    arm = next(arm for arm in config.arms if arm.name == one.arm)
    job = _Job(config, corpus, arm, one.seed, ArmModel.of(arm, config, corpus, base))
    work.start(1)
    work.begin(f"{job.called}, {job.header['parameters']:,} parameters")
    trained = _trained(job, [Progress(work=work), *make_trackers(config.track)])
    _write_records(job, trained, [])


def _write_records(job: "_Job", trained: "_Trained", locks: list[Lock]) -> None:
    """Measure a trained model; publish the run's records."""
    header, *lines = _records(job, trained)
    text = "".join(map(as_line, lines))
    for lock in locks:
        lock.check()  # measuring takes its time
    write_text(job.records, as_line(header | {SEAL: _sha256(text)}) + text)


def _opened(config: CompareConfig, say: Callable[[str], None]) -> tuple[Base | None, Corpus]:
    """The trained model to start from, where one is named; and the text."""
    began = _began(config)
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        return None, with_mask_token(corpus) if config.objective == "mlm" else corpus
    longest = max(arm.train.sequence_length for arm in config.arms)
    trust = config.trust_remote_code
    base = open_base(config.base, config.data, longest, trust_remote_code=trust, began=began)
    return base, base.corpus


def _began(config: CompareConfig) -> str | None:
    """The fingerprint of the data of a run that was begun in the output folder, if one was."""
    for arm, seed in itertools.product(config.arms, config.seeds):
        folder = _folder(config, arm, seed)
        if (folder / RECORDS).exists():
            return (_intact(folder / RECORDS).get("data") or {}).get("fingerprint")
        if (data := data_of(folder)) is not None:
            return data
    return None


def _folder(config: CompareConfig, arm: Arm, seed: int) -> Path:
    """The folder of a run."""
    return config.output / f"{arm.folder}-seed{seed}"


class _Job:
    """One run: an arm with a seed."""

    def __init__(
        self, config: CompareConfig, corpus: Corpus, arm: Arm, seed: int, model: ArmModel
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.arm = arm
        self.seed = seed
        self.settings = replace(arm.train, seed=seed)
        self.model = model
        if config.measure_every and arm.train.parallel == "fsdp":
            raise ClearheadError(
                "measure_every needs the whole model in one process: choose parallel ddp"
            )
        self.folder = _folder(config, arm, seed)
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
            **({"sizes": list(self.config.sizes)} if self.config.sizes else {}),
            "model": self.model.outline.config.to_diff_dict(),
            "train": asdict(self.settings),
            "data": self.corpus.describe(),
            **self.model.counts,
            "objective": self.config.objective,
            "lengths": [multiple * length for multiple in self.config.lengths],
            "evaluation_tokens": self.config.evaluation_tokens,
            "measure_every": milestone_steps(self.config.measure_every, self.settings),
            "documents": self.config.documents,
        }


def _check_optimizer(job: _Job) -> None:
    """Refuse one whose library is missing, or whose patterns match nothing."""
    model = copy.deepcopy(job.model.outline)
    try:
        choose_parameters(model, job.settings)
        build_optimizer(model, job.settings)
    except ClearheadError as error:
        raise ClearheadError(f"{job.arm.name}: {error}") from error


@dataclass(frozen=True)
class _Trained:
    """The model of a run, what its training took, and how it diverged."""

    model: Any
    measures: dict[str, Any]
    diverged: str | None = None


def _trained(job: _Job, callbacks: list[Callback]) -> _Trained:
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
    measures: dict[str, Any] = {}
    diverged = None
    try:
        model, result = train_to_end(
            model,
            made(corpus, settings, folder),
            settings,
            output=folder,
            tokenizer=corpus.tokenizer,
            callbacks=callbacks,
            description={"run": name},
        )
    except DivergedError as error:
        diverged = measures["reason"] = str(error)
    else:
        if result is None:
            measures["reason"] = "the process that trained it was stopped before the measurements"
        else:
            measures = {
                "train_seconds": result.seconds,
                "tokens_per_second": result.tokens_per_second,
                "peak_memory_bytes": result.peak_memory_bytes,
            }
    return _Trained(model, measures, diverged)


def _records(job: _Job, trained: _Trained) -> Iterator[dict[str, Any]]:
    """Measure a trained model; yields the run's records."""
    settings, corpus, folder = job.settings, job.corpus, job.folder
    name, every = job.header["run"], job.header["measure_every"]
    model, measures, diverged = trained.model, trained.measures, trained.diverged
    apart = job.config.documents == "apart"
    record = read_record(folder)
    yield job.header | {key: record[key] for key in KEYS if key in record} | {"diverged": diverged}
    for line in jsonl.salvage(folder / METRICS):
        yield line | {"kind": "step", "run": name}
    if every:
        yield from jsonl.salvage(folder / MILESTONES)
    for metric in ("train_seconds", "tokens_per_second", "peak_memory_bytes"):
        value = measures.get(metric)
        reason = {} if value is not None else {"reason": measures["reason"]}
        yield {"kind": "measure", "run": name, "metric": metric, "value": value, **reason}
    if diverged is not None:
        for length in job.header["lengths"]:
            measured = {"metric": "perplexity", "length": length, "value": None}
            yield {"kind": "measure", "run": name, **measured, "reason": diverged}
        return
    for found in measure(
        model,
        corpus,
        settings,
        lengths=job.header["lengths"],
        tokens=job.config.evaluation_tokens,
        documents_apart=apart,
    ):
        yield {"kind": "measure", "run": name, **found}
    if job.seed == job.config.seeds[0]:
        for found in attention_records(model, corpus):
            yield {"kind": "attention", "run": name, **found}


def relabelled(records: Path, **names: str) -> Iterator[dict[str, Any]]:
    """The lines of a file of records under other names, such as an "arm" and a "label".

    The label becomes part of each run's name, so that files can be joined.
    """
    for line in jsonl.read(records):
        line["run"] = f"{names['label']}/{line['run']}"
        if line["kind"] == "run":
            line |= names
            line.pop(SEAL, None)  # of these lines by their own names
        yield line


def _intact(path: Path) -> dict[str, Any]:
    """The header of a finished run's records.

    Raises:
        ClearheadError: naming the file, where it is not what was written whole.
    """
    advice = "restore it, or delete it to have the trained model measured again"
    try:
        runs = load(path).runs
    except ClearheadError as error:
        raise ClearheadError(f"{error}: {advice}") from error
    content = path.read_bytes()
    whole = len(runs) == 1 and content.endswith(b"\n")
    if whole and SEAL in runs[0].header:  # records of before have none
        whole = runs[0].header[SEAL] == _sha256(content.partition(b"\n")[2])
    if not whole:
        raise ClearheadError(f"{path} is damaged, cut short or changed: {advice}")
    return runs[0].header


def _sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _check_same(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse a folder whose finished run was made with other settings."""
    older: dict[str, Any] = {"measure_every": 0, "documents": "together"}
    asked, wanted = (
        {key: one.get(key) for key in _SETTINGS}
        | {"data": {"fingerprint": (one.get("data") or {}).get("fingerprint")}}
        for one in (older | found, header)
    )
    refuse_changes(path.parent, asked, wanted)
