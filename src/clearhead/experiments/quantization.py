"""Models under several schemes, as records."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from transformers.utils import logging

from clearhead.data import prepare
from clearhead.experiments.run_setup import load_model, text_of
from clearhead.experiments.sweep_configs import QuantizeConfig, short_names
from clearhead.measure import Portion, Subject, Texts
from clearhead.measure.sweep import sweep
from clearhead.models.inspection import dtype_name, parameter_count
from clearhead.models.loading import explained, load_config, resolved
from clearhead.models.memory import require_room
from clearhead.progress import Work
from clearhead.quantize import Scheme, every, left_out, linear_layers, scheme
from clearhead.quantize.linear import refuse_quantised
from clearhead.quantize.measure import QuantizationTask
from clearhead.records.runs import QUANTIZATION, Line

ALL = "all"


def run_quantization(
    config: QuantizeConfig,
    *,
    say: Callable[[str], None],
    work: Work | None = None,
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
        partial(_portion, config, source, name, schemes, say)
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


def _portion(
    config: QuantizeConfig,
    source: str,
    name: str,
    schemes: tuple[Scheme, ...],
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
    task = QuantizationTask(schemes=schemes, length=config.length)
    return Portion(
        header=_header(config, task, subject, name, source),
        subjects=[({}, subject)],
        tasks={"quantization": task},
        seeds=config.seeds,
        less=f"give a smaller --length than {config.length}",
    )


def _header(
    config: QuantizeConfig, task: QuantizationTask, subject: Subject, name: str, source: str
) -> dict[str, Any]:
    """The run's header: what is measured, on what, with what."""
    model, layers = subject.model, linear_layers(subject.model)
    weights = {id(p): p for layer in layers.values() for p in (layer.get_parameter("weight"),)}
    read = task.texts(subject)
    calibration = len(read.calibration)
    return {
        "run": name,
        "path": source,
        "class": type(model).__name__,
        "dtype": dtype_name(model),
        "parameters": parameter_count(model),
        "quantized_parameters": sum(weight.numel() for weight in weights.values()),
        "left_out": left_out(model, layers),
        "length": config.length,
        "tokens": sum(map(len, read.windows)),
        "calibration": f"{calibration} windows of the training split" if calibration else None,
    }
