"""A study: arms of an experiment as configurations, and the jobs that they make."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.lab.configs import RECORDS, Arm, ArmConfig, CompareConfig, FinetuneJob, Job
from clearhead.lab.sweep_configs import (
    DIAGNOSIS_FILE,
    FRESH,
    ConvertConfig,
    DiagnoseConfig,
    EvaluateConfig,
    PlanConfig,
    QuantizeConfig,
    SweepConfig,
)
from clearhead.records.loading import load
from clearhead.settings.data import DataConfig
from clearhead.settings.eval import OPTIONS
from clearhead.settings.train import TrainConfig

Question = SweepConfig | FinetuneJob | PlanConfig
# A seed that chose a rate does not count again: its best rate is best partly by luck.
SWEEP_SEED = 1000
# Of random rotations that sweeps start from, whatever seeds count. It is seed 0's too, which the
# rate may therefore suit a little better than it suits the others.
SWEPT_ROTATION = 0
TRAINED = ""  # model of a question: the one that the arm trains
TEXT = ""  # that calibrates a conversion: the first source of the training text
COSMOPEDIA = "hf:HuggingFaceTB/smollm-corpus:cosmopedia-v2"  # long enough to read each token once
BOOKS = "hf:emozilla/pg19"
WHOLE = 0.999  # the share held out of a text that is only measured on
BEYOND = 3  # rates that a sweep tries beyond those it was given, at most
SHAPE = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}


@dataclass(frozen=True, kw_only=True)
class Study(CompareConfig):
    """Arms on the same tokens under one label; `arm` is the study of one, with jobs in `output`."""

    presets: tuple[str, ...] = ("transformer",)
    seeds: tuple[int, ...] = (0, 1, 2)
    lengths: tuple[int, ...] = (1,)
    train: TrainConfig = field(default_factory=lambda: ArmConfig(log_every=20))
    sweep_tokens: int = 0
    """Tokens of a run that helps to choose a learning rate; it measures nothing while it trains."""
    questions: Mapping[str, Question] = field(default_factory=dict)
    """Evaluations of each seed's model beside compare's own measures, by file name."""
    tries: tuple[float, ...] = ()
    """Learning rates to choose from; none where the model is measured as it is, or untrained."""
    called: str = ""
    """Name of the arm; that of its preset and changes where not given."""
    conversion: ConvertConfig | None = None
    """The conversion of the model to start from; each seed draws its random rotations anew."""

    def arm(self, preset: str, *rates: float, **changes: Any) -> "Study":
        """One arm: a preset, learning rates and changes of the settings for all arms. Of several
        rates the best on held-out training text counts, or one beyond it, if it is at the edge."""
        vary = {key: (value,) for key, value in changes.items()}
        settings = {key: value for key, value in self.set.items() if key not in changes}
        return replace(self, presets=(preset,), set=settings, vary=vary, tries=rates)

    def each(self, presets: Iterable[str], *rates: float) -> "Iterator[Study]":
        """The arms of several presets at the same rates."""
        return (self.arm(preset, *rates) for preset in presets)

    def changed(self, *, length: int | None = None, **settings: Any) -> "Study":
        """The study with other settings of its own, its training or its text (`data`: the sources);
        any other name is a key of every model's configuration, or short for one (`SHAPE`). `length`
        is that of a sequence in training, and the model's positions."""
        if length is not None:
            whole = {"sequence_length": length, "max_position_embeddings": length}
            settings = whole | settings
        data, train, study = (
            {name: settings.pop(name) for name in kind.__dataclass_fields__ if name in settings}
            for kind in (DataConfig, TrainConfig, Study)
        )
        keys = {SHAPE.get(name, name): value for name, value in settings.items()}
        study |= {"data": replace(self.data, **data), "train": replace(self.train, **train)}
        return replace(self, set=self.set | keys, **study)

    @property
    def side(self) -> Arm:
        """The arm as one side of a comparison, by the name and the folder that it has there."""
        return self.arms[0]

    @property
    def name(self) -> str:
        """The arm's name in tables."""
        return self.called or self.side.name

    @property
    def key(self) -> str:
        return f"{self.label}/{self.name}"

    @property
    def is_swept(self) -> bool:
        return len(self.tries) > 1

    def attempt(self, rate: float) -> Job:
        """The run that tries a rate, with a seed and a text of its own."""
        short = self.changed(measure_every=0, tokens=self.sweep_tokens, held_out="training")
        start = self._conversion(SWEPT_ROTATION)
        return short._run(f"sweeps/{self._place}-{written(rate)}", rate, SWEEP_SEED, start)

    def runs(self, rate: float | None, seed: int, swept: tuple[float, ...] = ()) -> list[Job]:
        """The run that counts, of an arm that is trained, and the questions to its model."""
        start = self._conversion(seed)
        if rate is None:
            return [*self._evaluations(seed, start)]
        job = self._run(f"runs/{self._place}-seed{seed}", rate, seed, start)
        model = job.records.with_name(f"{self.side.folder}-seed{seed}") / "final"
        job = replace(job, model=model, swept=swept)
        return [job, *self._evaluations(seed, job)]

    def _conversion(self, seed: int) -> Job | None:
        """The job that converts the model to start from, where it is to be converted."""
        if (by := self.conversion) is None:
            return None
        by = replace(by, seed=seed if by.basis else 0)
        changes = {"rotate": ",".join(by.rotate), "prefix": by.prefix, "seed": by.seed}
        words = [*by.to, *(f"{key}={value}" for key, value in changes.items() if value)]
        words += ["learned"] * by.learn_rotation + ["equal"] * by.equalise
        name = f"models/{as_folder(' '.join(words))}"
        output = self.output / name
        text = self.data.data[0] if by.calibrate == TEXT else by.calibrate
        config = replace(by, calibrate=text, model=self.base or "", output=output)
        return self._job(name, config, output / "conversion.json", model=output)

    def _evaluations(self, seed: int, after: Job | None) -> Iterator[Job]:
        """The questions to the model that a job leaves, or to the experiment's."""
        model = str(after.model) if after else self.base or TRAINED
        preset, fresh = self.side.preset, {"size": self.size, "set": self.side.model}
        for name, question in self.questions.items():
            job, arm = f"evaluations/{self._place}-seed{seed}/{name}", self.name
            folder = self.output / job
            records = folder.with_name(f"{name}.jsonl")
            given: dict[str, Any] = {"models": (model,), "records": records}
            if isinstance(question, FinetuneJob):
                arm, records = f"{arm} on {name}", folder / RECORDS
                given = {"model": model, "seeds": (seed,), "output": folder}
            elif isinstance(question, PlanConfig):
                given |= {"models": (preset,), **fresh}
            elif isinstance(question, DiagnoseConfig):
                records, given = folder / DIAGNOSIS_FILE, {"models": (model,), "output": folder}
                if not model:  # fresh weights, drawn with the seed
                    given |= {"models": (f"{FRESH}{preset}",), "seeds": (seed,), **fresh}
                    given["data"] = self.data
            config = replace(question, **given)
            yield self._job(job, config, records, arm=arm, seed=seed, after=after)

    @property
    def _place(self) -> str:
        return f"{as_folder(self.label)}/{as_folder(self.called) or self.side.folder}"

    def _run(self, name: str, rate: float, seed: int, start: Job | None) -> Job:
        """One run in a folder of its own, so that runs go side by side."""
        one = self.changed(learning_rate=rate, seeds=(seed,), output=self.output / name)
        base = str(start.model) if start else self.base
        config = CompareConfig(**one.settings() | {"base": base})
        return self._job(name, config, one.output / RECORDS, seed=seed, after=start)

    def _job(self, name: str, config: Any, records: Path, **others: Any) -> Job:
        names = {"arm": self.name, "label": self.label}
        return Job(name=name, config=config, records=records, **names | others)


Arms = Callable[[str], Iterable[Study]]  # the study of each arm at a scale


class Experiment(NamedTuple):
    """An experiment of a paper."""

    name: str
    paper: str
    about: str
    arms: Arms
    scales: tuple[str, ...] = ("tiny", "small")


def experiment(paper: str, *, published: bool = False) -> Callable[[Arms], Experiment]:
    """Decorator of a function that yields arms; `published`: at the scale `paper` too."""

    def decorated(arms: Arms) -> Experiment:
        about = " ".join((arms.__doc__ or "").partition("\n\n")[0].split())
        once = cache(wraps(arms)(lambda scale: tuple(arms(scale))))
        scales = ("tiny", "small", "paper")[: 2 + published]
        return Experiment(arms.__name__.replace("_", "-"), paper, about, once, scales)

    return decorated


# Questions to the model that an arm trains, on one text for all arms; and its conversion.
_ASKED: dict[str, Any] = {"models": (TRAINED,), "data": DataConfig()}
diagnose, quantize = partial(DiagnoseConfig, **_ASKED), partial(QuantizeConfig, **_ASKED)
convert = partial(ConvertConfig, model=TRAINED, output=Path(), windows=4)


def evaluate(**settings: Any) -> Any:
    """An evaluation, with the options of a task as a mapping under its name."""
    options = {name: kind(**settings.pop(name, {})) for name, kind in OPTIONS.items()}
    return EvaluateConfig(**_ASKED | options | settings)


def as_folder(words: str) -> str:
    """Words as a file's name."""
    return re.sub(r"[^A-Za-z0-9._=+]+", "-", words).strip("-")


def best(losses: Mapping[float, float | None]) -> float | None:
    """The rate of the lowest loss that is known (not None); None where all diverged (inf)."""
    known = {rate: x for rate, x in losses.items() if x is not None and x < math.inf}
    return min(known, key=lambda rate: known[rate], default=None)


def beyond(losses: Mapping[float, float | None]) -> float | None:
    """The next rate to try, in two digits, where the best of several is the lowest or the highest:
    the edge is the geometric mean of it and of its neighbour. None until all losses are known."""
    ordered, chosen = sorted(losses), best(losses)
    for edge, inner in () if None in losses.values() else (ordered[:2], ordered[:-3:-1]):
        if edge == chosen:
            return float(f"{edge * edge / inner:.1e}")
    return None


def written(rate: float) -> str:
    """A rate as folders have it: 1.6e-2."""
    digits, exponent = f"{rate:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def loss(records: Path) -> float:
    """The held-out loss of a file's only run at its training length; inf where it diverged."""
    (run,) = load(records).runs
    measures = (run.measure(name, length=run.sequence_length) for name in ("loss", "masked loss"))
    values = [one.value for one in measures if one is not None]
    return math.inf if run.diverged or values[0] is None else values[0]
