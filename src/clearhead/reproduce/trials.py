"""A trial: one arm of an experiment as configurations, and the jobs that they make."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import ClearheadError
from clearhead.experiments.configs import RECORDS, CompareConfig, FinetuneJob
from clearhead.experiments.jobs import Job
from clearhead.experiments.sweep_configs import EvaluateSettings
from clearhead.records.loading import load

if TYPE_CHECKING:
    from clearhead.experiments.arms import Arm

Question = EvaluateSettings | FinetuneJob
# A seed that chose a rate does not count again: its best rate is best partly by luck.
SWEEP_SEED = 1000
TRAINED = ""
"""The model of a question: the one that the trial trains."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Arms on the same tokens in the same order, compared in one table."""

    config: CompareConfig
    """Configuration of every arm, with the baseline as preset; its label names the table."""
    sweep_tokens: int = 0
    """Tokens of a run that helps to choose a learning rate; it measures nothing while it trains."""
    questions: Mapping[str, Question] = field(default_factory=dict)
    """Evaluations of each seed's model beside compare's own measures, by file name."""

    def trial(self, preset: str, *rates: float, **changes: Any) -> "Trial":
        """One arm: a preset, its learning rates, and what is changed of it (`CompareConfig.vary`).

        A change takes the place of what the table sets for every arm. Of several rates the best by
        validation loss is chosen.
        """
        vary = {key: (value,) for key, value in changes.items()}
        kept = {key: value for key, value in self.config.set.items() if key not in changes}
        config = replace(self.config, presets=(preset,), set=kept, vary=vary)
        return Trial(table=replace(self, config=config), rates=rates)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An arm through its stages; every job has a folder or file of its own."""

    table: Table
    """A table whose configuration has this arm alone, with all seeds."""
    rates: tuple[float, ...]
    output: Path = Path()
    """Folder of the whole experiment."""

    @property
    def config(self) -> CompareConfig:
        return self.table.config

    @cached_property
    def arm(self) -> "Arm":
        """The arm, with its name and its folder."""
        (one,) = self.config.arms
        return one

    @property
    def key(self) -> str:
        return f"{self.config.label}/{self.arm.name}"

    def sweep(self) -> dict[float, Job]:
        """{rate: the run that tries it}, with a seed of its own; empty where there is one rate."""
        if len(self.rates) == 1:
            return {}
        train = replace(self.config.train, tokens=self.table.sweep_tokens)
        short = replace(self.config, measure_every=0, train=train)
        return {
            rate: self._run(f"rates/{self._place}-{written(rate)}", short, rate, SWEEP_SEED)
            for rate in self.rates
        }

    def best(self) -> float | None:
        """The rate of the lowest validation loss; None until all are known, or if all diverged."""
        if len(self.rates) == 1:
            return self.rates[0]
        losses = {rate: loss(job.records) for rate, job in self.sweep().items()}
        known = {rate: value for rate, value in losses.items() if value is not None}
        if len(known) < len(losses) or math.isinf(min(known.values())):
            return None
        return min(known, key=lambda rate: known[rate])

    def training(self, rate: float, seed: int) -> Job:
        """The run that counts."""
        return self._run(f"runs/{self._place}-seed{seed}", self.config, rate, seed)

    def evaluations(self, seed: int) -> Iterator[Job]:
        """The questions to the model that `training` leaves."""
        run = f"{self._place}-seed{seed}"
        model = self.output / "runs" / run / f"{self.arm.folder}-seed{seed}" / "final"
        folder = self.output / "evaluations" / run
        for name, question in self.table.questions.items():
            on, asked = "", question
            if isinstance(asked, FinetuneJob):
                on, output = f" on {name}", folder / name
                asked = replace(asked, model=str(model), seeds=(seed,), output=output)
                records = asked.output / RECORDS
            else:
                records = folder / f"{name}.jsonl"
                of = f"{self.arm.name}/seed{seed}"
                asked = replace(asked, models=(str(model),), name=of, records=records)
            yield Job(
                name=f"evaluations/{run}/{name}",
                config=asked,
                model=model,
                records=records,
                arm=self.arm.name + on,
                label=self.config.label,
            )

    @property
    def _place(self) -> str:
        return f"{self.config.label.replace(' ', '-')}/{self.arm.folder}"

    def _run(self, name: str, config: CompareConfig, rate: float, seed: int) -> Job:
        """One run in a folder of its own, so that runs go side by side."""
        output = self.output / name
        return Job(
            name=name,
            config=replace(
                config,
                seeds=(seed,),
                output=output,
                train=replace(config.train, learning_rate=rate),
            ),
            records=output / RECORDS,
            arm=self.arm.name,
            label=config.label,
        )


def written(rate: float) -> str:
    """A rate as folders and rates.json have it: 1.6e-2."""
    digits, exponent = f"{rate:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def loss(records: Path) -> float | None:
    """The validation loss of a file's only run, at its training length, of the next token or of
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
