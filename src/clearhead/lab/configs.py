"""Configurations of jobs; torch is imported only to check the models of a comparison."""

import hashlib
import itertools
import json
import re
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from clearhead import metavars
from clearhead.errors import ClearheadError, choose
from clearhead.metavars import OpensModels, Overrides, Variations
from clearhead.ranges import Count, Natural, Share, check, check_distinct
from clearhead.records.identity import canonical, digest_of
from clearhead.settings.data import TASKS, DataConfig, Task
from clearhead.settings.train import FinetuneConfig, Tracker, TrainConfig

RECORDS = "records.jsonl"  # in the output folder of a comparison or a fine-tuning
Base = Annotated[metavars.Model | None, tyro.conf.arg(name="from")]
BETWEEN = " · "
TRAIN = "train."
# Settings that do not vary: one process trains an arm, and --seeds has the seeds.
_FIXED = ("parallel", "timeout", "seed")
_SETTINGS = {TRAIN + one.name for one in fields(TrainConfig) if one.name not in _FIXED}
_Fixed = tyro.conf.Suppress[tyro.conf.Fixed[Any]]  # no option sets it


@dataclass(frozen=True, kw_only=True)
class TrainJob(OpensModels):
    """One training run: a model, its text and its settings."""

    preset: Positional[metavars.Preset | None] = None
    """Preset to train (clearhead plan lists them); by default transformer, or the model of --from
    as it is. A bidirectional one, such as bert, learns to predict hidden tokens."""
    base: Base = None
    """A trained causal model to go on from: a folder, a run or a hub name. A preset and KEY=VALUE
    pairs convert it to their mechanisms first, as clearhead convert does; its own tokenizer reads
    the text. Other defaults then hold: add --from MODEL to --help to see them."""
    size: metavars.Size = "tiny"
    """Size of the preset: tiny, small, medium, large, or a paper's own."""
    output: Path = Path("runs/train")
    """Folder of the run."""
    set: Overrides = field(default_factory=dict)
    """Changes to the preset's configuration, such as maps=differential."""
    track: tuple[Tracker, ...] = ()
    """Trackers to log to, beside metrics.jsonl; each needs its extra."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Settings of the training."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""
    resume: Path | None = None
    """Go on with the run in this folder, by its own settings. A larger --train.tokens extends it;
    what shapes no weight, such as --train.save-every, may change. --data.data, --data.tokenizer and
    --from name the new places of text, tokenizer and first model."""


@dataclass(frozen=True, kw_only=True)
class ArmConfig(TrainConfig):
    """Settings of the training of an arm, which one process does."""

    parallel: _Fixed = "ddp"
    timeout: _Fixed = TrainConfig.timeout


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A preset with changes, as one side of a comparison."""

    name: str
    """Name in tables, and key of the records: softmax1 · orthoadam."""
    preset: str
    changes: dict[str, Any]
    model: dict[str, Any]
    """Keys of the configuration: those set for every arm, and those varied."""
    train: TrainConfig

    @property
    def folder(self) -> str:
        """The name as a file's: softmax1+orthoadam; with a digest where characters were lost."""
        plain = self.name.replace(BETWEEN, "+").replace(" ", "=")
        safe = re.sub(r"[^A-Za-z0-9._+=-]", "-", plain)[:100]
        if safe == plain:
            return safe
        return f"{safe}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class CompareConfig(OpensModels):
    """A comparison: models, text and training."""

    presets: Positional[tuple[metavars.Preset, ...]] = ("transformer", "differential", "softmax1")
    """Presets to train; each with its changes is an arm. Arms are compared with the first arm of
    `transformer`, or else with the first of all."""
    base: Base = None
    """A trained causal model that every arm starts from, as for train; the preset transformer is
    the model itself. Other defaults then hold: add --from MODEL to --help to see them."""
    size: metavars.Size = "tiny"
    """Size of the presets: tiny, small, or a paper's own (clearhead plan lists them)."""
    set: Overrides = field(default_factory=dict)
    """Changes to the configuration of every preset, such as norm=rmsnorm-single."""
    vary: Variations = field(default_factory=dict)
    """Settings to vary, in every combination of their values. A key is train.FIELD, such as
    train.optimizer, or one of the configuration, such as norm or num_hidden_layers."""
    seeds: tuple[Natural, ...] = (0,)
    """Seeds, one run of every arm for each. A seed fixes initial weights and the data's order."""
    output: Path = Path("runs/compare")
    """Folder of the runs, records and page; the same command goes on where it stopped."""
    lengths: tuple[Count, ...] = (1, 2, 4, 8)
    """Multiples of the training length at which perplexity is measured (of encoders the loss at
    hidden tokens). If empty, only the speed and memory of training are measured."""
    evaluation_tokens: Count = 65_536
    """Validation tokens read at each length."""
    held_out: Literal["validation", "training"] = "validation"
    """Text on which losses are measured: the validation split, or a tenth of the training split,
    not trained on, to choose rates by."""
    measure_every: Share = 0
    """Share of all steps between measurements of outliers, attention and validation loss during
    training; 0 measures at the end only."""
    label: metavars.Name = ""
    """Label of the records on a page that shows several sets; empty for a run just made."""
    track: tuple[Tracker, ...] = ()
    """Trackers to log to, beside metrics.jsonl; each needs its extra."""
    train: TrainConfig = field(default_factory=lambda: ArmConfig(learning_rate=3e-3))
    """Training of every arm; the learning rate is the best of three at `tiny`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""

    def settings(self) -> dict[str, Any]:
        """The comparison's own fields by name, without a study's and without derived values."""
        return {one.name: getattr(self, one.name) for one in fields(CompareConfig)}

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Every preset with every combination of the values in `vary`."""
        for key in self.vary:
            if key.startswith(TRAIN) or TRAIN + key in _SETTINGS:
                choose("key to vary", key, _SETTINGS)
        arms = []
        for name, values in itertools.product(self.presets, itertools.product(*self.vary.values())):
            changes = dict(zip(self.vary, values, strict=True))
            words, model, settings = [name], dict(self.set), dict[str, Any]()
            for key, value in changes.items():
                text = value if isinstance(value, str) else json.dumps(value)
                short = key.removeprefix(TRAIN)
                # Optimizers are known by name; most other words, `none` say, need their key.
                words.append(text if key == "train.optimizer" else f"{short} {text}")
                (settings if key.startswith(TRAIN) else model)[short] = value
            called = BETWEEN.join(words)
            try:
                train = replace(self.train, **settings)
            except ClearheadError as error:
                raise ClearheadError(f"{called}: {error}") from error
            arms.append(Arm(name=called, preset=name, changes=changes, model=model, train=train))
        return tuple(arms)

    def check(self) -> None:
        """Refuse settings that cannot work, and models that are unknown or impossible."""
        check(self)
        check_distinct(self, "presets", "seeds", *(["lengths"] if self.lengths else []))
        if self.objective == "mlm" and self.measure_every:
            raise ClearheadError("measure_every is not for presets that predict hidden tokens")

    @cached_property
    def objective(self) -> str:
        """The objective of every arm: "next-token", or "mlm" where all are bidirectional."""
        from clearhead.lab.runs import objective_of
        from clearhead.models import preset
        from clearhead.models.starts import target

        learnt = dict[str, str]()
        for arm in self.arms:
            try:
                if self.base is not None:
                    target(arm.preset, arm.model)  # refuses what the base cannot become
                    learnt["next-token"] = arm.name
                else:
                    learnt[objective_of(preset(arm.preset, self.size, **arm.model))] = arm.name
            except ClearheadError as error:
                raise ClearheadError(f"{arm.name}: {error}") from error
        if len(learnt) > 1:
            hidden = f"{learnt['mlm']} predicts hidden tokens and {learnt['next-token']} the next"
            raise ClearheadError(f"{hidden}: compare alike")
        return next(iter(learnt))


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(OpensModels):
    """A fine-tuning: a checkpoint, a task and seeds."""

    model: Positional[metavars.Model]
    """A checkpoint's folder (RUN/final), or a hub name: causal, masked, or any encoder."""
    task: metavars.TaskName | None = None
    """A task of GLUE, such as rte, or banking77; without it, a task of your own."""
    train_file: metavars.Source | None = None
    """Training rows: .jsonl(.gz), or hf:NAME[:CONFIG][#SPLIT]; by default those of --task."""
    validation_file: tuple[metavars.Source, ...] = ()
    """Validation rows, in the same forms; each of several files is measured by itself."""
    text_field: metavars.Field | None = None
    """Field of the text; by default that of --task, or "text"."""
    pair_field: metavars.Field | None = None
    """Field of a second text, if rows have one."""
    label_field: metavars.Field | None = None
    """Field of the class; by default that of --task, or "label"."""
    seeds: tuple[Natural, ...] = (0,)
    """Seeds, one run for each. A seed fixes the head's initial weights, the order and dropout."""
    output: Path = Path("runs/finetune")
    """Folder of the models and records; the same command goes on where it stopped."""
    label: metavars.Name = ""
    """Label of the records on a page that shows several sets."""
    track: tuple[Tracker, ...] = ()
    """Trackers to log to, beside metrics.jsonl; each needs its extra."""
    train: FinetuneConfig = field(default_factory=FinetuneConfig)
    """Settings of the training."""

    def __post_init__(self) -> None:
        check(self)
        check_distinct(self, "seeds")
        if self.task is not None:
            choose("task", self.task, TASKS)
        files = self.train_file, self.validation_file
        if not (all(files) or (self.task is not None and not any(files))):
            known = ", ".join(TASKS)
            raise ClearheadError(f"give --task: {known}; or --train-file and --validation-file")

    def resolved(self) -> Task:
        """The task with the fields and the files that are given."""
        task = Task(name="text") if self.task is None else TASKS[self.task]
        if self.train_file is not None:
            if self.task is None:
                task = replace(task, name=Path(self.train_file).name.split(".")[0])
            splits = [Path(name).name.split(".")[0] for name in self.validation_file]
            if len(splits) == 1 or len({"train", *splits}) <= len(splits):
                splits = [f"validation {n}" if n else "validation" for n in range(len(splits))]
            files = tuple(zip(splits, self.validation_file, strict=True))
            task = replace(task, train=self.train_file, validation=files)
        fields = {"text": self.text_field, "pair": self.pair_field, "label": self.label_field}
        return replace(task, **{name: field for name, field in fields.items() if field})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Claims or experiments, and their scale."""

    seeds: tuple[Natural, ...] = ()
    """Seeds, in place of the experiment's own."""
    tokens: Count | None = None
    """Tokens of every training, in place of the experiment's own."""
    only: tuple[metavars.Pattern, ...] = ()
    """Arms to run, by name or pattern, such as "sas*"; by default all of the experiment."""
    questions: tuple[metavars.Pattern, ...] = ()
    """Measurements of each model, by name or pattern, such as banking77; by default all of the
    experiment. Some need the hub."""
    base: Base = None
    """The trained model to start from, a folder or a hub name, in place of the experiment's own."""
    data: tuple[metavars.Source, ...] = ()
    """Sources of the training text, in place of the experiment's own."""
    test_data: tuple[metavars.Source, ...] = ()
    """Sources of the evaluations' text, read whole, in place of the experiment's (where some of its
    text is from the hub, of that)."""
    names: Positional[tuple[metavars.Experiment, ...]] = ()
    """Claims (diff/table2), all claims of a family (diff), experiments (blocks), or all; --list
    prints them."""
    list: bool = False
    """Print every claim with the experiment that decides it, and every experiment with its cost at
    the scale."""
    judge: tuple[metavars.File, ...] = ()
    """Records to judge the claims by; nothing is run. --output names the book (Markdown)."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny runs on two CPU cores, small takes minutes a model on one GPU, paper is the published
    recipe, with a GPU for each of --jobs."""
    output: Path | None = None
    """Folder for all results; by default runs/EXPERIMENT-SCALE, in which claims of one experiment
    share its runs. The same command goes on where it stopped."""
    jobs: Count = 1
    """Jobs that run at once, each with its share of the CPU's threads and on the least used GPU."""


# Fields that no result depends on; and those that name the model which the job before leaves.
_PLACES = {"output", "records", "page", "track"}
_MODELS = {"base", "model", "models"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A configuration to run, and the records that it writes."""

    name: str  # also its log's: sweeps/6-layers/sas-8e-3
    config: Any
    records: Path  # a conversion's is conversion.json
    arm: str = ""
    label: str = ""
    seed: int = 0
    model: Path | None = None  # folder of the model that it writes
    after: "Job | None" = None  # the job that writes the model that it reads
    swept: tuple[float, ...] = ()  # learning rates among which a training's was chosen

    @property
    def key(self) -> str:
        """LABEL/ARM."""
        return f"{self.label}/{self.arm}"

    @property
    def chain(self) -> "list[Job]":
        """The jobs that make the model that this job reads, in order, and this job."""
        return [*(self.after.chain if self.after else ()), self]

    @property
    def identity(self) -> str:
        """Hash of the settings of this job and those before it, without paths: folders may move."""
        places = _PLACES if self.after is None else _PLACES | _MODELS
        settings = canonical(self.config)
        settings = {name: value for name, value in settings.items() if name not in places}
        return digest_of([type(self.config).__name__, settings, self.after and self.after.identity])


def continued_recipe(kind: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """Default settings for training from a trained model: higher rates ended worse, docs/log.md."""
    return kind(learning_rate=3e-5, sequence_length=512, batch_size=4)
