"""Published training runs as comparisons: a size, the presets trained at it, and the settings.

docs/recipes.md names what each paper leaves open or contradicts, and what was chosen there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.data import DataConfig
from clearhead.experiments.configs import CompareConfig
from clearhead.reproduce import rows
from clearhead.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A training run of a paper, of each preset that it compares.

    Attributes:
        parameters: as the paper names the model.
        size: of the presets, which the run is named after.
        settings: of `CompareConfig`.
        continues: the size whose checkpoint the run goes on from, if it does.
    """

    paper: str
    parameters: str
    size: str
    settings: Mapping[str, Any]
    continues: str = ""

    @property
    def config(self) -> CompareConfig:
        """`clearhead compare` of the presets."""
        return CompareConfig(size=self.size, lengths=(1,), **self.settings)

    @property
    def train(self) -> TrainConfig:
        train: TrainConfig = self.settings["train"]
        return train


def _runs() -> Iterator[PublishedRun]:
    for family in map(_value, rows("recipes")):
        paper, runs, shared, data = (family.pop(key) for key in ("paper", "run", "train", "data"))
        for run in runs:
            train = {"compile": "blocks", "log_every": 20, **shared, **run.pop("train", {})}
            settings = {**family, "train": TrainConfig(**train), "data": DataConfig(**data)}
            yield PublishedRun(paper=paper, settings=settings, **run)


def _value(read: Any) -> Any:
    """A value read from TOML, with tuples for lists."""
    if isinstance(read, dict):
        return {key: _value(one) for key, one in read.items()}
    return tuple(map(_value, read)) if isinstance(read, list) else read


RUNS: Mapping[str, PublishedRun] = {one.size: one for one in _runs()}
