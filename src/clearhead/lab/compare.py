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
from clearhead.lab.bases import Base, Outlined, counted, open_base, outlined
from clearhead.lab.configs import RECORDS, Arm, CompareConfig, milestone_steps
from clearhead.lab.final_measures import MILESTONES, Milestones, measure
from clearhead.lab.run_setup import batches, data_of
from clearhead.models import plan
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
        self, config: CompareConfig, opened: tuple[Corpus, Base | None], model: Outlined, seed: int
    ) -> None:
        corpus, base = opened
        arm, self.outline, self.build = model
        self.config, self.corpus, self.arm, self.seed = config, corpus, arm, seed
        # As it will be computed: the header of a record has no "auto".
        resolved = precision.resolve(arm.train.precision, best_device())
        self.settings = replace(arm.train, seed=seed, precision=resolved)
        self.folder = folder_of(config, arm, seed)
        self.records = self.folder / RECORDS
        self.called = f"{arm.name}, seed {seed}"
        # The run's own line of the records; the training run adds to it.
        self.header: dict[str, Any] = {
            "kind": "run",
            "run": f"{arm.name}/seed{seed}",
            "arm": arm.name,
            "preset": arm.preset,
            "changes": arm.changes,
            "size": config.size if base is None else "",
            "from": base and base.origin,
            "seed": seed,
            "label": config.label,
            "model": self.outline.config.to_diff_dict(),
            "train": asdict(self.settings),
            "data": corpus.describe(),
            **counted(self.outline),
            "objective": config.objective,
            "lengths": [multiple * arm.train.sequence_length for multiple in config.lengths],
            "evaluation_tokens": config.evaluation_tokens,
            "measure_every": milestone_steps(config.measure_every, self.settings),
            "documents": config.documents,
            "held_out": config.held_out,
        }
        if base is None:
            counts = plan(self.outline.config, length=arm.train.sequence_length)
            self.header["forward_flops"] = counts.forward_flops

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
        model = copy.deepcopy(self.outline)
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
        torch.manual_seed(self.seed)
        model = self.build().to(best_device())
        apart = self.config.documents == "apart"
        if every := self.header["measure_every"]:
            followed = Milestones(self.corpus, self.settings, every=every, documents_apart=apart)
            callbacks.append(followed)
        masked = self.config.objective == "mlm"
        result = diverged = None
        try:
            model, result = train_to_end(
                model,
                batches(self.corpus, self.settings, self.folder, masked=masked),
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
            options: Any = {"lengths": lengths, "tokens": self.config.evaluation_tokens}
            options["documents_apart"] = self.config.documents == "apart"
            for found in measure(model, self.corpus, self.settings, **options):
                yield {**measured, **found}


def compare(config: CompareConfig, *, work: Work | None = None) -> Records:
    """Train and measure every arm with every seed, and return the records.

    Progress is saved in `config.output`: called again after a stop, it resumes the unfinished run.
    A run that diverges is recorded as such, and the others continue: in a sweep that is a result.
    `work` shows the current run and its progress, one unit for each run.

    Raises:
        ClearheadError: for settings or data that do not work, a folder of other settings, in use
            or damaged, or where every run diverged.
        InterruptedRun: after SIGINT or SIGTERM, once the current run has saved.
    """
    config.check()
    work = Work(say=say) if work is None else work
    require_no_run(config.output)
    with hold_folder(config.output):
        runs, records = _runs(config), config.output / RECORDS
        for run in runs:  # all before the first is trained, which may take hours
            run.check()
        work.start(len(runs))
        for run in runs:
            if run.records.exists():
                work.skip()
                say(f"{run.called}: already done")
                continue
            run.make(work)
            _join(runs, records)
            work.end()
        _join(runs, records)
        done = load(records)
        for one in done.runs:
            if one.diverged:
                say(f"{one.arm}, seed {one.seed}: {one.header['diverged']}")
        if all(one.diverged for one in done.runs):
            raise DivergedError(f"no run stayed finite: {done.runs[0].header['diverged']}")
        return done


def _runs(config: CompareConfig) -> list[Run]:
    """Every arm with every seed; one seed of all arms comes before the next."""
    # The fingerprint of the data of a run that was begun in the output folder, if one was.
    folders = (folder_of(config, *run) for run in itertools.product(config.arms, config.seeds))
    began = next(filter(None, map(data_of, folders)), None)
    base = None
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        corpus = with_mask_token(corpus) if config.objective == "mlm" else corpus
    else:
        longest = max(arm.train.sequence_length for arm in config.arms)
        options: Any = {"trust_remote_code": config.trust_remote_code, "began": began}
        base = open_base(config.base, config.data, longest, alike=True, **options)
        corpus = base.corpus
    corpus = corpus.for_tuning() if config.held_out == "training" else corpus
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" * (len(unseen) > 3))
        say(f"nothing is held out of {named}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    models = [outlined(arm, config, corpus, base) for arm in config.arms]
    return [Run(config, (corpus, base), model, seed) for seed in config.seeds for model in models]


def _join(runs: list[Run], records: Path) -> None:
    """Join the records of the runs that are done."""
    done = (run.records.read_bytes().decode() for run in runs if run.records.exists())
    write_text(records, "".join(done))
