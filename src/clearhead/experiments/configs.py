"""Jobs as values: configurations that verbs read and experiments yield.

Nothing here needs torch until a comparison is made, whose presets are then checked.
"""

import math
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.consent import OpensModels
from clearhead.data.config import DataConfig
from clearhead.data.tasks import GLUE, Task
from clearhead.errors import ClearheadError, choose
from clearhead.eval.options import OPTIONS
from clearhead.ranges import Count, Length, Natural, Range, check
from clearhead.train.config import FinetuneConfig, TrainConfig

if TYPE_CHECKING:
    from clearhead.experiments.arms import Arm

RECORDS = "records.jsonl"
"""In the output folder of a comparison or a fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison: which models, on what, for how long."""

    presets: tuple[str, ...] = ("transformer", "differential", "softmax1")
    """Presets to train; the first arm of `transformer`, or else the first of all, is what the
    others are judged by."""
    size: str = "tiny"
    """Size of the presets: tiny, small, or a paper's own (clearhead plan lists them)."""
    set: dict[str, Any] = field(default_factory=dict)
    """Changes to the configuration of every preset, KEY=VALUE, such as norm=rmsnorm-single."""
    vary: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """KEY=VALUE,VALUE…: every preset is trained with each value, and with each combination where
    several keys are varied. A key is train.FIELD, such as train.optimizer, or one of the
    configuration, such as norm or num_hidden_layers."""
    seeds: tuple[Natural, ...] = (0,)
    """One run an arm for each; a seed fixes initial weights and the order of the data."""
    output: Path = Path("runs/compare")
    """Folder of the runs, records and report; the same command goes on where it stopped."""
    lengths: tuple[Count, ...] = (1, 2, 4, 8)
    """Perplexity, or of encoders the loss at hidden tokens, is measured at these multiples of the
    training length."""
    evaluation_tokens: Count = 65_536
    """Validation tokens read at each length."""
    measure_every: float = 0
    """Steps between measurements of outliers, attention and validation loss during training; below
    1 a fraction of all steps; 0 measures at the end only."""
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates of their own, where they were tuned: an arm's name, a part of it (a preset, an
    optimizer) or a pattern such as "softmax1*sgd", and the rate. The first that matches counts."""
    label: str = ""
    """Names the records on a report that shows several sets; empty for a run just made."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=3e-3))
    """Training of every arm; the learning rate is the best of three at `tiny`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("presets", "seeds", "lengths"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                found = " ".join(map(str, values)) or "none"
                raise ClearheadError(f"{name} must be one or more, each once; found {found}")
        # Refuses what is unknown or impossible before anything is read or written.
        for arm in self.arms:
            milestone_steps(self.measure_every, arm.train)
        if self.objective == "mlm" and self.measure_every:
            raise ClearheadError(
                "measure_every measures the loss of the next token, and these presets learn hidden "
                "ones: leave it out"
            )

    @cached_property
    def arms(self) -> tuple["Arm", ...]:
        """What is compared, in order."""
        from clearhead.experiments.arms import make_arms

        return make_arms(
            self.presets,
            self.size,
            self.train,
            set=self.set,
            vary=self.vary,
            rates=self.rates,
        )

    @cached_property
    def objective(self) -> str:
        """What every arm learns: "next-token", or "mlm" where all are bidirectional."""
        from clearhead.experiments.building import objective_of
        from clearhead.models import preset

        learnt = {
            objective_of(preset(arm.preset, self.size, **arm.model)): arm.name for arm in self.arms
        }
        if len(learnt) > 1:
            raise ClearheadError(
                f"{learnt['mlm']} predicts hidden tokens and {learnt['next-token']} the next, and "
                "the two losses do not compare: give presets of one direction"
            )
        return next(iter(learnt))

    @cached_property
    def documents(self) -> str:
        """How validation reads the documents of a window: "apart" where all training does."""
        apart = all(arm.train.document_masks for arm in self.arms)
        return "apart" if apart else "together"


def milestone_steps(every: float, settings: TrainConfig) -> int:
    """Steps between measurements, or 0 for none, from a number of steps or a fraction of all.

    Raises:
        ClearheadError: for a number that is neither, or that falls between the steps logged.
    """
    if not (math.isfinite(every) and every >= 0) or (every > 1 and every != int(every)):
        raise ClearheadError(
            f"measure_every is {every}: give a whole number of steps, a fraction of all steps "
            "below 1, or 0"
        )
    logged = settings.log_every
    if every < 1:
        return math.ceil(every * settings.steps / logged) * logged
    if every % logged:
        raise ClearheadError(
            f"measure_every is {every:g}, but only every {logged} steps are logged: give a "
            "multiple of train.log_every"
        )
    return int(every)


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(OpensModels):
    """What to measure, on what text."""

    model: Positional[str]
    """A checkpoint's folder (RUN/final), or a hub name."""
    tasks: tuple[str, ...] = ()
    """Of perplexity, passkey, needles, recall, hits, allocation, choices, shots, hallucination;
    masked for a masked one; any other name is a task of lm-eval. Unless given, perplexity or
    masked."""
    lengths: tuple[Length, ...] = ()
    """Lengths in tokens; unless given, 1, 2, 4 and 8 times max_position_embeddings."""
    tokens: Length = 65_536
    """Tokens of text read at each length, about."""
    rope_scaling: tuple[str, ...] = ("none",)
    """Of none, linear, ntk, dynamic, dynamic-causal, yarn: each task is measured under each."""
    factors: tuple[str, ...] = ()
    """Factors of the scalings."""
    split: Literal["validation", "all"] = "validation"
    """Documents that are read: the held-out ones, or all (for a file that no training saw)."""
    batch_tokens: Count = 8192
    """Tokens run together; no result depends on it."""
    seed: int = 0
    """Of keys, needles, places and samples."""
    name: str = ""
    """The run's name in the records; unless given, that of the training run, or the folder's."""
    label: str = ""
    """Names the set of records on a report."""
    records: Path | None = None
    """Append each cell to this file as it is done; the same command goes on where it stopped.
    Texts that a task has the model write are kept beside it, in FILE.texts."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is the model's own."""

    def __post_init__(self) -> None:
        check(self)


EvaluateConfig = make_dataclass(
    "EvaluateConfig",
    [(name, kind, field(default_factory=kind)) for name, kind in OPTIONS.items()],
    bases=(EvaluateSettings,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": EvaluateSettings.__doc__},
)


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """One checkpoint, one task, some seeds."""

    model: str
    """A checkpoint's folder (RUN/final), or a hub name: causal, masked, or any encoder."""
    trust_remote_code: bool = False
    """Whether Python code that the checkpoint brings may run."""
    task: str | None = None
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli; not given, a task of your own."""
    train_file: str | None = None
    """Training rows: .jsonl(.gz), or hf:NAME[:CONFIG][#SPLIT]. A GLUE task knows its own."""
    validation_file: tuple[str, ...] = ()
    """Validation rows, likewise; several are measured each by itself."""
    text_field: str | None = None
    """The field of the text; GLUE tasks know theirs, otherwise "text"."""
    pair_field: str | None = None
    """The field of a second text, if rows have one."""
    label_field: str | None = None
    """The field of the class; otherwise "label"."""
    seeds: tuple[Natural, ...] = (0,)
    """One run for each; a seed fixes the head's first weights, the order and the dropout."""
    output: Path = Path("runs/finetune")
    """Folder of the models and records; the same command goes on where it stopped."""
    label: str = ""
    """Names the records on a report that shows several sets."""
    train: FinetuneConfig = field(default_factory=FinetuneConfig)
    """Training."""
    cache: Path | None = None
    """Folder for what is downloaded; otherwise $CLEARHEAD_CACHE, or ~/.cache/clearhead."""

    def __post_init__(self) -> None:
        check(self)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ClearheadError(f"seeds must be one or more, each once; found {self.seeds}")
        if self.task is not None:
            choose("task", self.task, GLUE)
        elif self.train_file is None or not self.validation_file:
            raise ClearheadError(
                f"give --task, one of {', '.join(GLUE)}; or --train-file and --validation-file"
            )
        if (self.train_file is None) != (not self.validation_file):
            raise ClearheadError("give train-file and validation-file both, or neither")

    def resolved(self) -> Task:
        """The task with the fields and the files that are given."""
        found = Task(name="text") if self.task is None else GLUE[self.task]
        if self.train_file is not None:
            if self.task is None:
                found = replace(found, name=Path(self.train_file).name.split(".")[0])
            splits = [Path(name).name.split(".")[0] for name in self.validation_file]
            if len(splits) == 1 or len(set(splits)) < len(splits):
                splits = [f"validation {n}" if n else "validation" for n in range(len(splits))]
            found = replace(
                found,
                train=self.train_file,
                validation=tuple(zip(splits, self.validation_file, strict=True)),
            )
        return replace(
            found,
            text=self.text_field or found.text,
            pair=self.pair_field or found.pair,
            label=self.label_field or found.label,
        )


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What is read, and how."""

    length: Length | None = None
    """Tokens in a window; unless given 512, or what the model was made for if less."""
    windows: Count = 64
    """Windows of validation text."""
    at: Literal["anywhere", "documents"] = "anywhere"
    """Where windows begin: text in order without gaps, or the beginnings of documents, and so with
    the begin token where the tokenizer has one."""
    batch_tokens: Count = 4096
    """Tokens run together: memory and speed depend on it, the numbers do not."""
    extrapolate: Annotated[
        float, Range("at least 1 training length, 1 for no text beyond it", lambda x: x >= 1)
    ] = 4.0
    """One more text of so many training lengths; 1 reads none."""
    trained_length: Length | None = None
    """Tokens that the model was trained on; unless given, its max_position_embeddings."""

    def __post_init__(self) -> None:
        check(self)


def masked_recipe() -> TrainConfig:
    """The crammed BERT's recipe (arXiv 2212.14034): what masked training does unless told other.

    Its budget was a day of wall-clock, its full step 8,192 rows; here steps and tokens are counted.
    """
    return TrainConfig(
        sequence_length=128,
        batch_size=16,
        accumulation=8,
        ramp=0.6,
        learning_rate=1e-3,
        final_learning_rate=0.0,
        schedule="triangle",
        warmup=0.75,
        weight_decay=0.01,
        betas=(0.9, 0.98),
        epsilon=1e-12,
        clip=0.5,
    )
