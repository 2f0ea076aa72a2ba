"""The papers' experiments: the question of each, and the function that yields its arms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.eval.options import OPTIONS
from clearhead.experiments.configs import FinetuneJob
from clearhead.experiments.sweep_configs import (
    DiagnoseConfig,
    EvaluateSettings,
    PlanConfig,
    QuantizeConfig,
)
from clearhead.named_models import BASELINE, SIZES
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
from clearhead.reproduce.study import Question, Study


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
        return ("smoke", "tiny", "small", *(("paper",) if self.published else ()))

    def trials(self, scale: str) -> Iterator[Study]:
        """One study an arm; "smoke" is "tiny" with a few steps of a few narrow layers."""
        return map(smoke, self.arms("tiny")) if scale == "smoke" else self.arms(scale)


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


# The scale "smoke": arms small enough to run all in minutes, which try the machinery and decide
# nothing.

WINDOWS, HEAD = 2, 8
STEPS: dict[str, Any] = {
    **{"batch_size": WINDOWS, "accumulation": 1, "ramp": 0.0, "compile": "none"},
    **{"log_every": 1, "save_every": 0},
}
# Options of evaluations that count how much is drawn, and what is drawn here.
FEW: dict[str, Any] = {
    **dict.fromkeys(("trials", "samples", "queries"), 1),
    **{"depths": (0.5,), "grid": ("1x1",), "document_tokens": None},
}
DOWNLOADS = ("shots", "hallucination")  # and tasks of lm-eval


def smoke(one: Study) -> Study:
    """The arm with one seed, one rate, four steps and two narrow layers, on text at hand.

    Where it starts from a trained model, the baseline of this size is trained for it first.
    """
    length, based = one.train.sequence_length, one.base is not None
    heads = {**SIZES[one.size], **({} if based else one.side.model)}["num_attention_heads"]
    shape = {"hidden_size": HEAD * heads, "num_hidden_layers": 2}
    kept = {key: x for key, x in one.set.items() if key not in ("head_dim", "intermediate_size")}
    text = _at_hand(one.data)
    fresh = replace(text, vocabulary=512)
    little = replace(
        one,
        set=kept if based else {**kept, **shape},
        seeds=(0,),
        lengths=one.lengths[:2],
        evaluation_tokens=WINDOWS * length,
        measure_every=0,
        train=replace(one.train, tokens=4 * WINDOWS * length, **STEPS),
        data=text if based else fresh,
        questions={
            name: _little(question, length)
            for name, question in one.questions.items()
            if not (isinstance(question, FinetuneJob) or _downloads(question))
        },
        parameters=None,
        tries=one.tries[:1],
    )
    if one.conversion is not None and one.conversion.prefix == "auto":
        # A model of four steps has no sink that a token would take.
        given = replace(one.conversion, prefix=r"\n", calibrate=None)
        little = replace(little, conversion=given)
    if not based:
        return little
    train = replace(little.train, only=(), freeze=(), lora=0)
    start = replace(
        little, base=None, set=shape, train=train, data=fresh, label="base", conversion=None
    )
    return replace(little, start=start.arm(BASELINE, 1e-3))


def _downloads(question: Question) -> bool:
    local = OPTIONS.keys() - DOWNLOADS
    return isinstance(question, EvaluateSettings) and not local.issuperset(question.tasks)


def _at_hand(data: DataConfig) -> DataConfig:
    """Hub sources give way to the standard library's."""
    words = dict.fromkeys("python-stdlib" if one.startswith("hf:") else one for one in data.data)
    return DataConfig(data=tuple(words), limit=200_000, validation=data.validation)


def _little(question: Question, length: int) -> Question:
    if isinstance(question, FinetuneJob | PlanConfig):
        return question
    read: dict[str, Any] = {"data": _at_hand(question.data)}
    if isinstance(question, DiagnoseConfig):
        if question.at == "anywhere":  # a document has the length that it has
            read["length"] = length
        return replace(question, windows=WINDOWS, **read)
    if isinstance(question, QuantizeConfig):
        return replace(question, length=length, tokens=WINDOWS * length, **read)
    for name in OPTIONS.keys() & {*question.tasks}:
        options = getattr(question, name)
        read[name] = replace(options, **{key: FEW[key] for key in FEW if hasattr(options, key)})
    return replace(
        question,
        lengths=question.lengths[:1] + question.lengths[1:][-1:],
        tokens=2 * max(question.lengths, default=question.tokens),
        factors=question.factors[1:2] or question.factors,  # of all the one that claims name
        split="validation",
        **read,
    )
