"""Every experiment made small enough to run in a minute: it tries the machinery alone."""

from dataclasses import replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.eval.options import OPTIONS
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.sweep_configs import DiagnoseConfig, EvaluateSettings, PlanConfig, QuantizeConfig
from clearhead.named_models import SIZES
from clearhead.papers.requests import EXPERIMENTS
from clearhead.papers.study import Experiment, Question, Study

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


def smoke(one: Study, base: str) -> Study:
    """The arm with one seed, one rate, four steps and two narrow layers, on text at hand; where it
    starts from a trained model, that is `base`."""
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
        tries=one.tries[:1],
    )
    if one.conversion is not None and one.conversion.prefix == "auto":
        # A model of four steps has no sink that a token would take.
        given = replace(one.conversion, prefix=r"\n", calibrate=None)
        little = replace(little, conversion=given)
    return replace(little, base=base) if based else little


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


def experiments(base: str = "") -> dict[str, Experiment]:
    """The experiments, each with these arms at `tiny`."""
    return {
        name: replace(one, arms=lambda _, arms=one.arms: (smoke(arm, base) for arm in arms("tiny")))
        for name, one in EXPERIMENTS.items()
    }
