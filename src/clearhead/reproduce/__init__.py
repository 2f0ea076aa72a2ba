"""The papers' experiments: one function each, the intervention marked; and what runs them."""

import importlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.reproduce.trials import Trial


@dataclass(frozen=True)
class Experiment:
    """A question of a paper, and the function that yields its trials at a scale."""

    name: str
    paper: str
    question: str
    function: str
    """MODULE.NAME, in this package; imported when it is run."""
    published: bool = False

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it has: "paper" only where the recipe is published."""
        return ("smoke", "tiny", "small", *(("paper",) if self.published else ()))

    def trials(self, scale: str) -> "Iterator[Trial]":
        """One trial an arm; "smoke" is "tiny" with a few steps of a few narrow layers."""
        module, _, name = self.function.rpartition(".")
        make = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        if scale != "smoke":
            return iter(make(scale))
        smoke = importlib.import_module(f"{__name__}.smoke").smoke
        return (smoke(one) for one in make("tiny"))


def rows(name: str) -> list[dict[str, Any]]:
    """The tables of NAME.toml."""
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text("utf-8")
    (found,) = tomllib.loads(text).values()
    return list(found)


EXPERIMENTS = {row["name"]: Experiment(**row) for row in rows("experiments")}
