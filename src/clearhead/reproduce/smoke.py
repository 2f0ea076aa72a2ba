"""Trials made small enough to run all in minutes: they try the machinery, and decide nothing."""

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
from clearhead.reproduce.trials import Measurement, Question, Table, Trial

STEPS, WINDOWS, HEAD = 4, 2, 8
TEXT = "python-stdlib"
BYTES = 200_000
# Options of evaluations that count how much is drawn, and what is drawn here.
FEW: dict[str, Any] = {
    "trials": 1,
    "samples": 1,
    "queries": 1,
    "depths": (0.5,),
    "grid": ("1x1",),
    "document_tokens": None,
}


def smoke(trial: Trial) -> Trial:
    """The trial with one seed, one rate, four steps and two narrow layers, on text at hand.

    Where it starts from a trained model, the baseline of this size is trained for it first.
    """
    config = trial.config
    usual = {**SIZES[config.size], **({} if config.base else trial.arm.model)}
    shape = {"hidden_size": HEAD * usual["num_attention_heads"], "num_hidden_layers": 2}
    length = config.train.sequence_length
    train = replace(
        config.train,
        tokens=STEPS * WINDOWS * length,
        batch_size=WINDOWS,
        accumulation=1,
        ramp=0.0,
        compile="none",
        log_every=1,
        save_every=0,
    )
    kept = {
        key: value
        for key, value in config.set.items()
        if key not in ("head_dim", "intermediate_size")
    }
    config = replace(
        config,
        set=kept if config.base else {**kept, **shape},
        seeds=(0,),
        lengths=config.lengths[:2],
        evaluation_tokens=WINDOWS * length,
        measure_every=0,
        train=train,
        data=_text(config.data),
    )
    own = replace(config.data, vocabulary=512)  # of a model that begins anew
    base = None
    if config.base:
        first = replace(
            config,
            presets=(BASELINE,),
            base=None,
            set=shape,
            vary={},
            train=replace(config.train, only=(), freeze=(), lora=0),
            data=own,
            label="base",
        )
        base = Trial(table=Table(config=first), rates=(1e-3,))
    else:
        config = replace(config, data=own)
    questions = {
        name: question if isinstance(question, PlanConfig) else _little(question, length)
        for name, question in trial.table.questions.items()
        if not (isinstance(question, FinetuneJob) or _downloads(question))
    }
    table = replace(trial.table, config=config, questions=questions, parameters=None)
    conversion = trial.conversion
    if conversion is not None and conversion.prefix == "auto":
        # A model of four steps has no sink that a token would take.
        conversion = replace(conversion, prefix=r"\n", calibrate=None)
    return replace(trial, table=table, rates=trial.rates[:1], base=base, conversion=conversion)


def _downloads(question: Question) -> bool:
    """True where the data of its tasks come from the hub: lm-eval's, labelled texts, documents."""
    local = OPTIONS.keys() - {"shots", "hallucination"}
    return isinstance(question, EvaluateSettings) and not local.issuperset(question.tasks)


def _text(data: DataConfig) -> DataConfig:
    """Hub sources give way to the standard library's."""
    sources = dict.fromkeys(TEXT if one.startswith("hf:") else one for one in data.data)
    return DataConfig(data=tuple(sources), limit=BYTES, validation=data.validation)


def _little(question: Measurement, length: int) -> Question:
    text = _text(question.data)
    if isinstance(question, DiagnoseConfig):
        if question.at == "anywhere":  # a document has the length that it has
            question = replace(question, length=length)
        return replace(question, windows=WINDOWS, data=text)
    if isinstance(question, QuantizeConfig):
        return replace(question, length=length, tokens=WINDOWS * length, data=text)
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
        data=text,
    )
