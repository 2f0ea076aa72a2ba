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
    scales: tuple[str, ...] = ("smoke", "tiny", "small", "paper")

    def trials(self, scale: str) -> "Iterator[Trial]":
        """One trial an arm; "smoke" is "tiny" with a few steps of a few narrow layers."""
        module, _, name = self.function.rpartition(".")
        make = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        if scale != "smoke":
            return iter(make(scale))
        smoke = importlib.import_module(f"{__name__}.smoke").smoke
        return (smoke(one) for one in make("tiny"))


SCALES = ("smoke", "tiny", "small", "paper")
UNPUBLISHED = ("smoke", "tiny", "small")
DIFFERENTIAL, COCA = "arXiv 2410.05258", "arXiv 2309.08646"
BLOCKS, SOFTMAX1 = "arXiv 2311.01906", "arXiv 2410.17174"

EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "differential",
            DIFFERENTIAL,
            "Does a difference of two maps find more and have smaller outliers?",
            "differential.differential",
        ),
        Experiment(
            "differential-ablations",
            DIFFERENTIAL,
            "Which parts of differential attention matter?",
            "differential.ablations",
        ),
        Experiment(
            "differential-scaling",
            DIFFERENTIAL,
            "Does its lead hold as models grow?",
            "differential.scaling",
            UNPUBLISHED,
        ),
        Experiment(
            "long-context",
            COCA,
            "Which attention, trained short, still reads and retrieves in long texts?",
            "long_context.long_context",
        ),
        Experiment("blocks", BLOCKS, "Which parts of a block can go?", "blocks.blocks"),
        Experiment(
            "depth",
            BLOCKS,
            "Do simplified blocks train when deep, and keep their lead when trained for longer?",
            "blocks.depth",
        ),
        Experiment(
            "encoders",
            BLOCKS,
            "Do simplified blocks learn GLUE as a crammed BERT does?",
            "encoders.encoders",
        ),
        Experiment(
            "outliers",
            SOFTMAX1,
            "Do softmax-1 and OrthoAdam remove sinks and outlier activations?",
            "outliers.outliers",
        ),
        Experiment(
            "sink",
            SOFTMAX1,
            "What removes a sink from a text that grows one?",
            "sinks.sink",
            UNPUBLISHED,
        ),
        Experiment(
            "elimination",
            SOFTMAX1,
            "Which part of the model makes the sink?",
            "sinks.elimination",
            UNPUBLISHED,
        ),
        Experiment(
            "optimizers",
            SOFTMAX1,
            "Which optimizers make outlier activations?",
            "sinks.optimizers",
            UNPUBLISHED,
        ),
        Experiment(
            "ladder",
            "ours",
            "At which size are puzzles of several steps solved, and which mechanisms help?",
            "puzzles.ladder",
            UNPUBLISHED,
        ),
        Experiment(
            "together",
            "ours",
            "Do the repairs add up?",
            "together.together",
            UNPUBLISHED,
        ),
        Experiment(
            "retrofit",
            "ours",
            "Which repair of a trained model makes few bits cheap, and does it take a repair?",
            "retrofit.retrofit",
            UNPUBLISHED,
        ),
    )
}
