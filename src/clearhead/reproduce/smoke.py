"""Arms made small enough to run all in minutes: they try the machinery, and decide nothing."""

from dataclasses import replace
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
from clearhead.reproduce.study import Question, Study

STEPS, WINDOWS, HEAD = 4, 2, 8
TEXT = "python-stdlib"
BYTES = 200_000
STEP = {"batch_size": WINDOWS, "accumulation": 1, "ramp": 0.0, "compile": "none"}
SILENT = {"log_every": 1, "save_every": 0}
# Options of evaluations that count how much is drawn, and what is drawn here.
FEW: dict[str, Any] = {
    **dict.fromkeys(("trials", "samples", "queries"), 1),
    "depths": (0.5,),
    "grid": ("1x1",),
    "document_tokens": None,
}


def smoke(one: Study) -> Study:
    """The arm with one seed, one rate, four steps and two narrow layers, on text at hand.

    Where it starts from a trained model, the baseline of this size is trained for it first.
    """
    length, based = one.train.sequence_length, one.base is not None
    usual = {**SIZES[one.size], **({} if based else one.side.model)}
    shape = {"hidden_size": HEAD * usual["num_attention_heads"], "num_hidden_layers": 2}
    kept = {key: x for key, x in one.set.items() if key not in ("head_dim", "intermediate_size")}
    sizes: dict[str, Any] = {"tokens": STEPS * WINDOWS * length, **STEP, **SILENT}
    text = _text(one.data)
    own = replace(text, vocabulary=512)  # of a model that begins anew
    little = replace(
        one,
        set=kept if based else {**kept, **shape},
        seeds=(0,),
        lengths=one.lengths[:2],
        evaluation_tokens=WINDOWS * length,
        measure_every=0,
        train=replace(one.train, **sizes),
        data=text if based else own,
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
        little, base=None, set=shape, train=train, data=own, label="base", conversion=None
    )
    return replace(little, start=start.arm(BASELINE, 1e-3))


def _downloads(question: Question) -> bool:
    """True where the data of its tasks come from the hub: lm-eval's, labelled texts, documents."""
    local = OPTIONS.keys() - {"shots", "hallucination"}
    return isinstance(question, EvaluateSettings) and not local.issuperset(question.tasks)


def _text(data: DataConfig) -> DataConfig:
    """Hub sources give way to the standard library's."""
    sources = dict.fromkeys(TEXT if one.startswith("hf:") else one for one in data.data)
    return DataConfig(data=tuple(sources), limit=BYTES, validation=data.validation)


def _little(question: Question, length: int) -> Question:
    if isinstance(question, FinetuneJob | PlanConfig):
        return question
    read: dict[str, Any] = {"data": _text(question.data)}
    if isinstance(question, DiagnoseConfig):
        if question.at == "anywhere":  # a document has the length that it has
            read["length"] = length
        return replace(question, windows=WINDOWS, **read)
    if isinstance(question, QuantizeConfig):
        return replace(question, length=length, tokens=WINDOWS * length, **read)
    changes: dict[str, Any] = {
        name: replace(options, **{key: FEW[key] for key in FEW if hasattr(options, key)})
        for name in question.tasks
        if name in OPTIONS
        for options in [getattr(question, name)]
    }
    return replace(
        question,
        **changes,
        lengths=question.lengths[:1] + question.lengths[1:][-1:],
        tokens=2 * max(question.lengths, default=question.tokens),
        factors=question.factors[1:2] or question.factors,  # of all the one that claims name
        split="validation",
        **read,
    )
