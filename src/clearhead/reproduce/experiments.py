"""The papers' experiments: the question of each, and the function that yields its arms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clearhead.reproduce import (
    blocks,
    costs,
    differential,
    encoders,
    long_context,
    outliers,
    retrofit,
    sinks,
    together,
)
from clearhead.reproduce.study import Study


@dataclass(frozen=True)
class Experiment:
    """A question of a paper, and the function that yields the study of each arm at a scale."""

    name: str
    paper: str
    question: str
    arms: Callable[[str], Iterator[Study]]
    published: bool = False

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it has: "paper" only where the recipe is published."""
        return ("tiny", "small", *(("paper",) if self.published else ()))


DIFF, COCA, SAS, SOFTMAX1 = (
    f"arXiv {number}" for number in ("2410.05258", "2309.08646", "2311.01906", "2410.17174")
)
# fmt: off
EXPERIMENTS = {one.name: one for one in (
    Experiment("differential", DIFF,
        "Does a difference of two maps find more and have smaller outliers?",
        differential.differential, True),
    Experiment("differential-ablations", DIFF, "Which parts of differential attention matter?",
        differential.ablations, True),
    Experiment("differential-scaling", DIFF, "Does its lead hold as models grow?",
        differential.scaling),
    Experiment("abilities", DIFF,
        "Does differential attention answer, classify and summarise better?",
        differential.abilities, True),
    Experiment("long-context", COCA,
        "Which attention, trained short, still reads and retrieves in long texts?",
        long_context.long_context, True),
    Experiment("memory", COCA,
        "Does collinear attention need tensors that grow with the square of the text, and what "
        "does it cache?", costs.memory),
    Experiment("blocks", SAS, "Which parts of a block can go?", blocks.blocks, True),
    Experiment("blocks-books", SAS, "Do simplified blocks match on books, too?", blocks.books),
    Experiment("blocks-scaling", SAS,
        "Does the lead of simplified blocks shrink as models and tokens grow?", blocks.scaling),
    Experiment("ratios", SAS, "Do trained values and projections go back to the identity?",
        blocks.ratios, True),
    Experiment("signal", SAS, "Do tokens stay apart in a deep block before any training?",
        blocks.signal),
    Experiment("speed", f"{DIFF}, {SAS}",
        "How fast do differential maps and simplified blocks train here?", costs.speed),
    Experiment("depth", SAS,
        "Do simplified blocks train when deep, and keep their lead when trained for longer?",
        blocks.depth, True),
    Experiment("blocks-longer", SAS,
        "Does the lead of simplified blocks survive ten tokens a parameter?", blocks.longer),
    Experiment("encoders", SAS,
        "Do simplified blocks learn GLUE and Banking-77 as a crammed BERT does?",
        encoders.encoders, True),
    Experiment("outliers", SOFTMAX1,
        "Do softmax-1 and OrthoAdam remove sinks and outlier activations?",
        outliers.outliers, True),
    Experiment("outliers-deep", SOFTMAX1,
        "Does OrthoAdam remove outliers where a model has them?", blocks.outliers),
    Experiment("sink", SOFTMAX1, "What removes a sink from a text that grows one?", sinks.sink),
    Experiment("sink-text", SOFTMAX1,
        "Does ordinary text grow a sink, and does softmax-1 take it?", sinks.text),
    Experiment("elimination", SOFTMAX1, "Which part of the model makes the sink?",
        sinks.elimination),
    Experiment("together", "ours", "Do the repairs add up?", together.together),
    Experiment("composition", "ours",
        "Is the composition of the repairs that win better than the baseline?",
        together.composition),
    Experiment("retrofit", "ours",
        "Which repair of a trained model makes few bits cheap, and does it take a repair?",
        retrofit.retrofit),
)}
# fmt: on
