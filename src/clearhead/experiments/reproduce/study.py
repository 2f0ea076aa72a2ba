"""What an experiment declares, and the commands that this comes to."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from clearhead.data import DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments import arms
from clearhead.experiments.compare import RECORDS
from clearhead.experiments.reproduce.runner import Command
from clearhead.records.loading import load
from clearhead.train import TrainConfig

Words = tuple[str, ...]

# A seed that chose a rate does not count again: its best rate is best partly by luck.
SWEEP_SEED = 1000


@dataclass(frozen=True)
class Arm:
    """A preset with the intervention beside it, and the learning rates that it may have."""

    preset: str
    rates: Words
    """One, or several to choose the best from."""
    changes: Mapping[str, str | float] = field(default_factory=dict)
    """The intervention: {KEY: value} of the configuration, or train.FIELD."""

    @cached_property
    def compared(self) -> arms.Arm:
        """As `clearhead compare` knows it: its name and its folder."""
        vary: dict[str, tuple[Any, ...]] = {key: (value,) for key, value in self.changes.items()}
        return arms.make_arms([self.preset], "tiny", TrainConfig(), set={}, vary=vary, rates={})[0]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms on the same tokens in the same order: what one table compares."""

    name: str
    arms: tuple[Arm, ...]
    tokens: int
    """Of each run."""
    sweep_tokens: int = 0
    """Of each run that helps to choose a rate."""
    options: Words = ()
    """Of every run, those of `clearhead compare`."""
    measure: Words = ()
    """More options, but not of those that choose a rate."""
    text: DataConfig = field(default_factory=DataConfig)
    """What is learnt; the loss on what is held out of it chooses the rates."""
    test: Words = ()
    """Options of an evaluation that name its text."""
    seeds: tuple[int, ...] = (0, 1, 2)
    questions: Callable[["Series", int], Iterable[Command]] = lambda series, seed: ()
    """What the model of each seed is asked beside compare's own measures."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """An arm of a study through its stages; every command has a folder or file of its own."""

    study: Study
    arm: Arm
    output: Path
    """Folder of the whole experiment."""

    @property
    def key(self) -> str:
        return f"{self.study.name}/{self.arm.compared.name}"

    def sweep(self) -> dict[str, Command]:
        """{rate: the run that tries it}, with a seed of its own; none where there is no choice."""
        several = self.arm.rates if len(self.arm.rates) > 1 else ()
        tokens = self.study.sweep_tokens
        return {
            rate: self._run(f"rates/{self._place}-{rate}", rate, SWEEP_SEED, tokens)
            for rate in several
        }

    def best(self) -> str | None:
        """The rate of the lowest validation loss; None until all are known, or if all diverged."""
        if len(self.arm.rates) == 1:
            return self.arm.rates[0]
        found = {rate: loss(command.records) for rate, command in self.sweep().items()}
        known = {rate: value for rate, value in found.items() if value is not None}
        if len(known) < len(found) or math.isinf(min(known.values())):
            return None
        return min(known, key=lambda rate: known[rate])

    def training(self, rate: str, seed: int) -> Command:
        """The run that counts."""
        name = f"runs/{self._place}-seed{seed}"
        return self._run(name, rate, seed, self.study.tokens, *self.study.measure)

    def evaluations(self, seed: int) -> list[Command]:
        return list(self.study.questions(self, seed))

    def eval(self, seed: int, name: str, *words: str) -> Command:
        """`clearhead eval` of the model that `training` leaves."""
        records = self.evaluated(seed) / f"{name}.jsonl"
        run = f"{self.arm.compared.name}/seed{seed}"
        kept = ("--name", run, "--records", str(records))
        return self.ask(seed, name, "eval", *kept, *words, records=records)

    def ask(
        self, seed: int, name: str, verb: str, *words: str, records: Path, on: str = ""
    ) -> Command:
        """`clearhead VERB MODEL …`; `on` sets the arm of its records apart from the training's."""
        folder = f"{self.arm.compared.folder}-seed{seed}"
        model = self.output / f"runs/{self._place}-seed{seed}/{folder}/final"
        return Command(
            name=f"evaluations/{self._place}-seed{seed}/{name}",
            words=(verb, str(model), *words),
            model=model,
            records=records,
            arm=self.arm.compared.name + on,
            label=self.study.name,
        )

    def evaluated(self, seed: int) -> Path:
        """Folder of what a model answered."""
        return self.output / f"evaluations/{self._place}-seed{seed}"

    @property
    def _place(self) -> str:
        return f"{self.study.name.replace(' ', '-')}/{self.arm.compared.folder}"

    def _run(self, name: str, rate: str, seed: int, tokens: int, *more: str) -> Command:
        """`clearhead compare` of one run in a folder of its own, so that runs go side by side."""
        changes = [f"{key}={value}" for key, value in self.arm.changes.items()]
        return Command(
            name=name,
            words=(
                *("compare", self.arm.preset, *(("--vary", *changes) if changes else ())),
                *("--output", str(self.output / name), "--label", self.study.name),
                *("--seeds", str(seed), "--train.learning-rate", rate),
                *("--train.tokens", str(tokens), *self.study.options, *more),
                *_data_words(self.study.text),
            ),
            records=self.output / name / RECORDS,
            arm=self.arm.compared.name,
            label=self.study.name,
        )


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


def _data_words(text: DataConfig) -> Words:
    """The options that say so, such as `--data.vocabulary 512`; none of defaults."""
    words = list[str]()
    for option in fields(text):
        value = getattr(text, option.name)
        if value != option.default:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--data.{option.name.replace('_', '-')}", *map(str, values)]
    return tuple(words)
