"""Models diagnosed on a text, and measured under schemes of few bits, as records."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from clearhead.data import Corpus, prepare
from clearhead.diagnose.diagnosis import LESS_MEMORY, DiagnosisTask
from clearhead.errors import ClearheadError
from clearhead.experiments.run_setup import load_model, own_text, text_of, untrained
from clearhead.experiments.sweep_configs import (
    DIAGNOSIS_FILE,
    FRESH,
    DiagnoseConfig,
    QuantizeConfig,
    short_names,
)
from clearhead.measure.sweep import Portion, Subject, Texts, sweep
from clearhead.models.catalogue import preset
from clearhead.models.inspection import dtype_name, longest_text, parameter_count, within_memory
from clearhead.models.loading import explained, load_config, resolved
from clearhead.models.memory import require_room
from clearhead.progress import Work
from clearhead.quantize import Scheme, every, left_out, linear_layers, scheme
from clearhead.quantize.linear import refuse_quantised
from clearhead.quantize.measure import QuantizationTask
from clearhead.records.runs import DIAGNOSIS, QUANTIZATION, Line

ALL = "all"
LENGTH = 512  # of a diagnosis


def run_quantization(
    config: QuantizeConfig, *, say: Callable[[str], None], work: Work | None = None
) -> list[Line]:
    """Measure the models in full precision and under each scheme; return their records.

    `work` is that of `sweep`.

    Raises:
        ClearheadError: for a model, a text or options that do not work; a perplexity in full
            precision that cannot be measured.
    """
    config = replace(config, data=text_of(config.data, config.models))
    names = [name for word in config.scheme for name in (every() if word == ALL else [word])]
    schemes = tuple(scheme(name) for name in dict.fromkeys(names))
    check_models(config)
    portions = [
        partial(_quantized, config, source, name, schemes, say)
        for source, name in zip(config.models, short_names(config.models), strict=True)
    ]
    return sweep(portions, records=config.records, study=QUANTIZATION, work=work)


def check_models(config: QuantizeConfig) -> None:
    """Refuse a path that leads nowhere, a model in few bits, and one too large for the memory,
    before the others are measured."""
    for source in config.models:
        path = resolved(source)
        with explained(path):
            settings = load_config(path, trust_remote_code=config.trust_remote_code)
        refuse_quantised(settings, source)
        require_room(source, "quantize", copies=2)


def _quantized(
    config: QuantizeConfig,
    source: str,
    name: str,
    schemes: Sequence[Scheme],
    say: Callable[[str], None],
) -> Portion:
    model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
    # What transformers warns of from here on, such as attention that is out of reach, is a result.
    logging.set_verbosity_error()
    subject = Subject(
        model=model,
        tokenizer=tokenizer,
        texts=Texts(
            lambda: prepare(config.data, tokenizer=tokenizer, progress=say), ("validation",)
        ),
        lengths=(config.length,),
        tokens=config.tokens,
        batch_tokens=config.length,  # a scale of a batch would be no one text's
        seed=config.seeds[0],
    )
    task = QuantizationTask(schemes=tuple(schemes), length=config.length)
    layers, read = linear_layers(model), task.texts(subject)
    weights = {one.get_parameter("weight") for one in layers.values()}  # shared ones count once
    calibration = len(read.calibration)
    return Portion(
        header={
            "run": name,
            "path": source,
            "class": type(model).__name__,
            "dtype": dtype_name(model),
            "parameters": parameter_count(model),
            "quantized_parameters": sum(weight.numel() for weight in weights),
            "left_out": left_out(model, layers),
            "length": config.length,
            "tokens": sum(map(len, read.windows)),
            "calibration": f"{calibration} windows of the training split" if calibration else None,
        },
        subjects=[({}, subject)],
        tasks={"quantization": task},
        seeds=config.seeds,
        less=f"give a smaller --length than {config.length}",
    )


def run_diagnosis(
    config: DiagnoseConfig, *, say: Callable[[str], None], work: Work | None = None
) -> list[Line]:
    """Diagnose the models; return their records, which are in `config.output` too.

    Raises:
        ClearheadError: for a model, a text or options that do not work.
    """
    if config.set and not any(one.startswith(FRESH) for one in config.models):
        raise ClearheadError("--set has no effect on a trained model: diagnose init:NAME")
    config = replace(config, data=text_of(config.data, config.models))
    for source in config.models:
        if source.startswith(FRESH):  # a mistyped name is refused before the other is measured
            preset(source.removeprefix(FRESH), config.size or "tiny", **config.set)
        else:
            require_room(source, "diagnose", copies=1)
    portions = [
        partial(_diagnosed, config, source, name, say)
        for source, name in zip(config.models, short_names(config.models), strict=True)
    ]
    return sweep(portions, records=config.output / DIAGNOSIS_FILE, study=DIAGNOSIS, work=work)


def _diagnosed(
    config: DiagnoseConfig, source: str, name: str, say: Callable[[str], None]
) -> Portion:
    with within_memory(LESS_MEMORY):
        model, corpus = _loaded(source, config, say)
    limits = longest_text(model), getattr(model.config, "max_position_embeddings", None)
    length = config.length or min(LENGTH, next(filter(None, limits), LENGTH))
    task = DiagnosisTask(length=length, windows=config.windows, at=config.at)
    subject = Subject(
        model=model,
        tokenizer=corpus.tokenizer,
        texts=Texts(lambda: corpus, ("validation",)),
        lengths=(length,),
        tokens=length * config.windows,
        batch_tokens=config.batch_tokens,
        seed=config.seeds[0],
    )
    windows = len(task.texts(subject))
    say(f"{name}: {windows} windows")
    return Portion(
        header={
            "run": name,
            "parameters": parameter_count(model),
            "architecture": type(model).__name__,
            "dtype": dtype_name(model),
            "windows": windows,
            "at": config.at,
            "length": length,
            "batch_size": max(1, config.batch_tokens // length),
        },
        subjects=[({}, subject)],
        tasks={"diagnosis": task},
        seeds=config.seeds,
        less=LESS_MEMORY,
    )


def _loaded(source: str, config: DiagnoseConfig, say: Callable[[str], None]) -> tuple[Any, Corpus]:
    if source.startswith(FRESH):
        torch.manual_seed(config.seeds[0])
        name, size = source.removeprefix(FRESH), config.size or "tiny"
        return untrained(name, size, config.set, config.data, say=say)
    model, tokenizer = load_model(
        source, kinds=("causal", "masked", "bare"), trust_remote_code=config.trust_remote_code
    )
    return model, own_text(config.data, tokenizer, progress=say)
