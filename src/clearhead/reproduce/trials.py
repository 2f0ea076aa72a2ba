"""A trial: one arm of an experiment as configurations, and the jobs that they make."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.data.config import DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import RECORDS, CompareConfig, FinetuneJob
from clearhead.experiments.convert_config import ConvertConfig
from clearhead.experiments.jobs import Job
from clearhead.experiments.sweep_configs import (
    DIAGNOSIS_FILE,
    FRESH,
    OWN,
    DiagnoseConfig,
    EvaluateSettings,
    PlanConfig,
    QuantizeConfig,
    SweepConfig,
)
from clearhead.records.loading import load

if TYPE_CHECKING:
    from clearhead.experiments.arms import Arm

Measurement = EvaluateSettings | DiagnoseConfig | QuantizeConfig
Question = Measurement | FinetuneJob | PlanConfig
# A seed that chose a rate does not count again: its best rate is best partly by luck.
SWEEP_SEED = 1000
SWEPT_ROTATION = 0
"""The seed of random rotations that sweeps start from, whatever seeds count. It is seed 0's own
too, which the rate may therefore suit a little better than it suits the others; the text and the
order that chose the rate do not count again. The sweeps of `results/` started from it."""
TRAINED = ""
"""The model of a question: the one that the trial trains."""
TEXT = ""
"""The text that calibrates a conversion: the first source of the training text."""
COSMOPEDIA = "hf:HuggingFaceTB/smollm-corpus:cosmopedia-v2"
"""A text of billions of tokens, for models that read each once."""
WHOLE = 0.999
"""The share held out of a text that is only measured on."""


BEYOND = 3
"""Rates that a sweep tries beyond those it was given, at most."""

Losses = Mapping[float, float | None]
"""{rate: held-out loss}: inf where the run diverged, None where the loss is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Arms on the same tokens in the same order, compared in one table."""

    config: CompareConfig
    """Configuration of every arm, with the baseline as preset; its label names the table."""
    sweep_tokens: int = 0
    """Tokens of a run that helps to choose a learning rate; it measures nothing while it trains."""
    questions: Mapping[str, Question] = field(default_factory=dict)
    """Evaluations of each seed's model beside compare's own measures, by file name."""
    parameters: int | None = None
    """Parameters of the trained model to start from, where there is one."""

    def changed(self, **settings: Any) -> "Table":
        """The table with other settings of its configuration."""
        return replace(self, config=replace(self.config, **settings))

    def trial(self, preset: str, *rates: float, **changes: Any) -> "Trial":
        """One arm: a preset, its learning rates, and what is changed of it (`CompareConfig.vary`).

        A change takes the place of what the table sets for every arm. Of several rates that with
        the lowest loss on training text which its run left out is chosen. While that is the lowest
        or the highest, the next beyond it is tried too, `BEYOND` at most.
        """
        vary = {key: (value,) for key, value in changes.items()}
        kept = {key: value for key, value in self.config.set.items() if key not in changes}
        return Trial(table=self.changed(presets=(preset,), set=kept, vary=vary), rates=rates)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An arm through its stages; every job has a folder or file of its own."""

    table: Table
    """A table whose configuration has this arm alone, with all seeds."""
    rates: tuple[float, ...]
    """Learning rates to choose from; none where the model is measured as it is, or untrained."""
    output: Path = Path()
    """Folder of the whole experiment."""
    called: str = ""
    """Name of the arm; that of its preset and changes where not given."""
    base: "Trial | None" = None
    """The trial whose first model is the one to start from, in place of the table's own."""
    conversion: ConvertConfig | None = None
    """The conversion of the model to start from, before it is trained; random rotations are drawn
    anew with each seed."""

    @property
    def config(self) -> CompareConfig:
        return self.table.config

    @cached_property
    def arm(self) -> "Arm":
        """The arm, with its name and its folder."""
        (one,) = self.config.arms
        return one

    @property
    def name(self) -> str:
        """The arm's name in tables."""
        return self.called or self.arm.name

    @property
    def reads(self) -> bool:
        """True where it trains or is measured on text."""
        questions = self.table.questions.values()
        return bool(self.rates) or any(isinstance(one, SweepConfig) for one in questions)

    @property
    def key(self) -> str:
        return f"{self.config.label}/{self.name}"

    def preparations(self) -> list[Job]:
        """The training and the conversions that make the models to start from, each once."""
        jobs = dict[str, Job]()
        seeds = [*self.config.seeds, *[SWEPT_ROTATION] * self.is_swept]
        for job in map(self._preparation, seeds):
            for one in (job and job.after, job):
                if one is not None:
                    jobs.setdefault(one.name, one)
        return [*jobs.values()]

    def _preparation(self, seed: int) -> Job | None:
        """The last job that makes the model to start from; none where it is there, or the arm
        begins anew."""
        made = None
        if self.base is not None:
            base = replace(self.base, output=self.output / "base")
            made = base.training(base.rates[0], base.config.seeds[0])
        conversion = self.conversion
        if conversion is None:
            return made
        if conversion.is_drawn:
            conversion = replace(conversion, seed=seed)
        changes = {
            "rotate": ",".join(conversion.rotate),
            "prefix": conversion.prefix,
            "seed": conversion.seed,
        }
        words = [*conversion.to, *(f"{key}={one}" for key, one in changes.items() if one)]
        words += ["learned"] * conversion.learn_rotation + ["equal"] * conversion.equalise
        output = self.output / "models" / as_folder(" ".join(words))
        if conversion.calibrate == TEXT:
            conversion = replace(conversion, calibrate=self.config.data.data[0])
        return Job(
            name=f"models/{output.name}",
            config=replace(conversion, model=self._source(made), output=output),
            records=output / "conversion.json",
            arm=self.name,
            label=self.config.label,
            model=output,
            after=made,
        )

    def _source(self, after: Job | None) -> str:
        """The model that a job leaves, or else the experiment's own; none of an arm that begins
        anew."""
        return self.config.base or "" if after is None else str(after.model)

    @property
    def is_swept(self) -> bool:
        """True where a sweep chooses among several rates."""
        return len(self.rates) > 1

    def losses(self) -> dict[float, float | None]:
        """{rate: loss} of the sweep, from its records; None where not known yet, empty where there
        is one rate. Its own rates come first, then those beyond an edge."""
        if not self.is_swept:
            return {}
        losses = {rate: loss(self.attempt(rate).records) for rate in self.rates}
        for _ in range(BEYOND):
            if (rate := beyond(losses)) is not None:
                losses[rate] = loss(self.attempt(rate).records)
        return losses

    def tried(self) -> dict[float, float | None]:
        """The losses without one beyond an edge that is not known yet."""
        losses = self.losses().items()
        return {rate: one for rate, one in losses if one is not None or rate in self.rates}

    def best(self) -> float | None:
        """The rate of the lowest loss of those tried; None until all its own are known, where all
        diverged, and of an arm that is not trained."""
        return best(self.tried()) if self.is_swept else next(iter(self.rates), None)

    def attempt(self, rate: float) -> Job:
        """The run that tries a rate, with a seed and a text of its own."""
        train = replace(self.config.train, tokens=self.table.sweep_tokens)
        short = replace(self.config, measure_every=0, train=train, held_out="training")
        start = self._preparation(SWEPT_ROTATION)
        return self._run(f"sweeps/{self._place}-{written(rate)}", short, rate, SWEEP_SEED, start)

    def jobs(self, rate: float | None, seed: int) -> Iterator[Job]:
        """The run that counts, of an arm that is trained, and the questions to its model."""
        job = self._preparation(seed)
        if rate is not None:
            yield (job := self.training(rate, seed))
        yield from self._evaluations(seed, job)

    def training(self, rate: float, seed: int) -> Job:
        """The run that counts."""
        start = self._preparation(seed)
        job = self._run(f"runs/{self._place}-seed{seed}", self.config, rate, seed, start)
        model = job.records.parent / f"{self.arm.folder}-seed{seed}" / "final"
        return replace(job, model=model, swept=tuple(sorted(self.tried())))

    def _evaluations(self, seed: int, after: Job | None) -> Iterator[Job]:
        """The questions to the model that a job leaves, or to the experiment's own."""
        run = f"{self._place}-seed{seed}"
        model = self._source(after)
        folder = self.output / "evaluations" / run
        for name, question in self.table.questions.items():
            on, asked = "", question
            if isinstance(asked, SweepConfig) and asked.data.data == OWN:  # one text for all arms
                asked = replace(asked, data=replace(asked.data, data=DataConfig.data))
            if isinstance(asked, FinetuneJob):
                on, output = f" on {name}", folder / name
                asked = replace(asked, model=model, seeds=(seed,), output=output)
                records = asked.output / RECORDS
            elif isinstance(asked, PlanConfig):
                records = folder / f"{name}.jsonl"
                shape: dict[str, Any] = {"size": self.config.size, "set": self.arm.model}
                asked = replace(asked, models=(self.arm.preset,), records=records, **shape)
            elif isinstance(asked, DiagnoseConfig):
                asked = replace(asked, models=(model,), output=folder / name)
                if not model:  # fresh weights, drawn with the seed
                    asked = replace(
                        asked,
                        models=(f"{FRESH}{self.arm.preset}",),
                        size=self.config.size,
                        set=self.arm.model,
                        seeds=(seed,),
                        data=self.config.data,
                    )
                records = asked.output / DIAGNOSIS_FILE
            else:
                records = folder / f"{name}.jsonl"
                asked = replace(asked, models=(model,), records=records)
            yield Job(
                name=f"evaluations/{run}/{name}",
                config=asked,
                records=records,
                arm=self.name + on,
                label=self.config.label,
                seed=seed,
                after=after,
            )

    @property
    def _place(self) -> str:
        return f"{as_folder(self.config.label)}/{as_folder(self.called) or self.arm.folder}"

    def _run(
        self, name: str, config: CompareConfig, rate: float, seed: int, start: Job | None
    ) -> Job:
        """One run in a folder of its own, so that runs go side by side."""
        output = self.output / name
        return Job(
            name=name,
            config=replace(
                config,
                seeds=(seed,),
                output=output,
                base=self._source(start) or None,
                train=replace(config.train, learning_rate=rate),
            ),
            records=output / RECORDS,
            arm=self.name,
            label=config.label,
            seed=seed,
            after=start,
        )


def as_folder(words: str) -> str:
    """Words as a file's name."""
    return re.sub(r"[^A-Za-z0-9._=+]+", "-", words).strip("-")


# Learning rates of a sweep


def best(losses: Losses) -> float | None:
    """The rate of the lowest loss; None until all losses are known, and where all diverged."""
    known = {rate: value for rate, value in losses.items() if value is not None}
    if not known or len(known) < len(losses) or math.isinf(min(known.values())):
        return None
    return min(known, key=lambda rate: known[rate])


def beyond(losses: Losses) -> float | None:
    """The next rate to try, in two digits, where the best of several is the lowest or the highest.

    That edge is the geometric mean of it and of the edge's neighbour.
    """
    ordered, chosen = sorted(losses), best(losses)
    for edge, inner in (ordered[:2], ordered[:-3:-1]):
        if edge == chosen:
            return float(f"{edge * edge / inner:.1e}")
    return None


def written(rate: float) -> str:
    """A rate as folders and rates.json have it: 1.6e-2."""
    digits, exponent = f"{rate:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def loss(records: Path) -> float | None:
    """The held-out loss of a file's only run, at its training length, of the next token or of
    hidden ones; inf where the run diverged; None where there is no such file.

    Raises:
        ClearheadError: where the run has no such loss.
    """
    if not records.exists():
        return None
    (run,) = load(records).runs
    if run.header.get("diverged"):
        return math.inf
    for metric in ("loss", "masked loss"):
        line = run.measure(metric, length=run.sequence_length)
        if line is not None:
            return math.inf if line.value is None else line.value
    raise ClearheadError(f"{records} holds no loss at the training length: delete its folder")
