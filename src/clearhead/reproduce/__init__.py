"""The papers' experiments: one function each, the intervention marked; and what runs them."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    scales: tuple[str, ...] = ("tiny", "small", "paper")

    def trials(self, scale: str) -> "Iterator[Trial]":
        """One trial an arm."""
        module, _, name = self.function.rpartition(".")
        found: Iterator[Trial] = getattr(importlib.import_module(f"{__name__}.{module}"), name)(
            scale
        )
        return found


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("blocks", "arXiv 2311.01906", "Which parts of a block can go?", "blocks.blocks"),
        Experiment(
            "encoders",
            "arXiv 2311.01906",
            "Do simplified blocks learn GLUE as a crammed BERT does?",
            "encoders.encoders",
        ),
        Experiment(
            "long-context",
            "arXiv 2309.08646",
            "Which attention, trained short, still reads and retrieves in long texts?",
            "long_context.long_context",
        ),
        Experiment(
            "outliers",
            "arXiv 2410.17174",
            "Do softmax-1 and OrthoAdam remove sinks and outlier activations?",
            "outliers.outliers",
        ),
    )
}
