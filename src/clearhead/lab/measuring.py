"""Evaluation, diagnosis and simulated quantisation of models, as records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from clearhead.data import Corpus, prepare
from clearhead.diagnose.diagnosis import LESS_MEMORY, DiagnosisTask
from clearhead.errors import ClearheadError, choose
from clearhead.eval import TASKS, WITHOUT_LENGTH, check_names, parted
from clearhead.lab.run_setup import fitted, load_model, new_model, own_text, run_of, text_of
from clearhead.lab.sweep_configs import (
    DIAGNOSIS_FILE,
    FRESH,
    DiagnoseConfig,
    QuantizeConfig,
    short_names,
)
from clearhead.measure.sweep import Portion, Subject, Task, Texts, sweep
from clearhead.models import SCALINGS, with_rope_scaling
from clearhead.models.catalogue import preset
from clearhead.models.inspection import dtype_name, longest_text, parameter_count, within_memory
from clearhead.models.loading import best_device, explained, load_config, require_room, resolved
from clearhead.probe.tiles import DIFFLLAMA
from clearhead.progress import Work
from clearhead.quantize import every, left_out, linear_layers, scheme
from clearhead.quantize.linear import refuse_quantised
from clearhead.quantize.measure import QuantizationTask
from clearhead.records.runs import DIAGNOSIS, QUANTIZATION, Line
from clearhead.terminal import say
from clearhead.train import TrainConfig

ALL = "all"
LENGTH = 512  # of a diagnosis
MASKED, HARNESS, NONE = "masked", "lm_eval", "none"


def run_quantization(config: QuantizeConfig, *, work: Work | None = None) -> list[Line]:
    """Measure the models in full precision and under each scheme; return their records.

    Raises:
        ClearheadError: for a model, a text or options that do not work; a perplexity in full
            precision that cannot be measured.
    """
    config = replace(config, data=text_of(config.data, config.models))
    names = [name for word in config.scheme for name in (every() if word == ALL else [word])]
    task = QuantizationTask(schemes=tuple(map(scheme, dict.fromkeys(names))), length=config.length)
    check_models(config)

    def portion(source: str, name: str) -> Portion:
        model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
        # What transformers warns of from here on, as of attention out of reach, is a result.
        logging.set_verbosity_error()
        text = partial(prepare, config.data, tokenizer=tokenizer, progress=say)
        subject = Subject(
            model=model,
            tokenizer=tokenizer,
            texts=Texts(text, ("validation",)),
            lengths=(config.length,),
            tokens=config.tokens,
            batch_tokens=config.length,  # a scale of a batch would be no one text's
            seed=config.seeds[0],
        )
        layers, read = linear_layers(model), task.texts(subject)
        weights = {one.get_parameter("weight") for one in layers.values()}  # shared ones once
        found = len(read.calibration)
        header = {
            "run": name,
            "path": source,
            "class": type(model).__name__,
            "dtype": dtype_name(model),
            "parameters": parameter_count(model),
            "quantized_parameters": sum(weight.numel() for weight in weights),
            "left_out": left_out(model, layers),
            "length": config.length,
            "tokens": sum(map(len, read.windows)),
            "calibration": f"{found} windows of the training split" if found else None,
        }
        less = f"give a smaller --length than {config.length}"
        return _portion(header, subject, {"quantization": task}, config.seeds, less)

    named = zip(config.models, short_names(config.models), strict=True)
    portions = [partial(portion, *one) for one in named]
    return sweep(portions, records=config.records, study=QUANTIZATION, work=work)


def _portion(
    header: Line, subject: Subject, tasks: Mapping[str, Task], seeds: Sequence[int], less: str
) -> Portion:
    """The part of a sweep that a model is, as it stands."""
    return Portion(header=header, subjects=[({}, subject)], tasks=tasks, seeds=seeds, less=less)


def check_models(config: QuantizeConfig) -> None:
    """Refuse a missing path, a quantised model, and one too large for the memory, before any model
    is measured."""
    for source in config.models:
        refuse_quantised(_settings(source, config.trust_remote_code), source)
        require_room(source, "quantize", copies=2)


def require_maps(source: str, trust_remote_code: bool) -> None:
    """Refuse a model whose attention maps no probe combines, before another is measured."""
    if _settings(source, trust_remote_code).model_type == "diffllama":
        raise ClearheadError(DIFFLLAMA)


def _settings(source: str, trust_remote_code: bool) -> Any:
    with explained(path := resolved(source)):
        return load_config(path, trust_remote_code=trust_remote_code)


def run_diagnosis(config: DiagnoseConfig, *, work: Work | None = None) -> list[Line]:
    """Diagnose the models; return their records, which are in `config.output` too."""
    if config.set and not any(one.startswith(FRESH) for one in config.models):
        raise ClearheadError("--set has no effect on a trained model: diagnose init:NAME")
    config = replace(config, data=text_of(config.data, config.models))
    for source in config.models:
        if source.startswith(FRESH):  # a mistyped name is refused before the other is measured
            preset(source.removeprefix(FRESH), config.size or "tiny", **config.set)
        else:
            require_maps(source, config.trust_remote_code)
            require_room(source, "diagnose", copies=1)

    def portion(source: str, name: str) -> Portion:
        with within_memory(LESS_MEMORY):
            model, corpus = _loaded(source, config)
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
        header = {
            "run": name,
            "parameters": parameter_count(model),
            "architecture": type(model).__name__,
            "dtype": dtype_name(model),
            "windows": windows,
            "at": config.at,
            "length": length,
            "batch_size": max(1, config.batch_tokens // length),
        }
        return _portion(header, subject, {"diagnosis": task}, config.seeds, LESS_MEMORY)

    named = zip(config.models, short_names(config.models), strict=True)
    portions = [partial(portion, *one) for one in named]
    return sweep(portions, records=config.output / DIAGNOSIS_FILE, study=DIAGNOSIS, work=work)


def _loaded(source: str, config: DiagnoseConfig) -> tuple[Any, Corpus]:
    if source.startswith(FRESH):
        torch.manual_seed(config.seeds[0])
        corpus = prepare(config.data, progress=say)
        name, size = source.removeprefix(FRESH), config.size or "tiny"
        model = new_model(fitted(name, size, corpus, TrainConfig(), **config.set))
        return model.to(best_device()).eval(), corpus
    model, tokenizer = load_model(
        source, kinds=("causal", "masked", "bare"), trust_remote_code=config.trust_remote_code
    )
    return model, own_text(config.data, tokenizer)


def run_evaluation(
    config: Any, *, work: Work | None = None, told: Callable[[list[Line]], object] | None = None
) -> list[Line]:
    """Measure every cell that the configuration names; return the records (`told`: see `sweep`)."""
    named, config = _named(config)
    variants = _variants(config)
    runs = [_header(config, model) for model in map(resolved, config.models)]
    names = [run["run"] for run in runs]
    if len(set(names)) < len(names):
        for run, name in zip(runs, short_names(config.models), strict=True):
            run["run"] = run["preset"] = name

    def portion(source: str, run: Line) -> Portion:
        model, tokenizer = load_model(
            source, kinds=("causal", "masked"), trust_remote_code=config.trust_remote_code
        )
        tasks = _tasks(config, source, named, model)
        text = partial(text_of, config.data, config.models)
        subject = Subject(
            model=model,
            tokenizer=tokenizer,
            texts=Texts(
                lambda: prepare(text(), tokenizer=tokenizer, progress=say),
                ("train", "validation") if config.split == "all" else ("validation",),
            ),
            lengths=_lengths(config.lengths, model, tasks),
            tokens=config.tokens,
            batch_tokens=config.batch_tokens,
            seed=config.seeds[0],
        )
        run |= {"weights": subject.weights}  # those of a scaled variant differ
        run |= {"model": {"from": source, **model.config.to_diff_dict()}}
        subjects = []
        for kind, factor in variants:
            changed = model if factor is None else with_rope_scaling(model, kind, factor=factor)
            subjects.append(({"scaling": kind, "factor": factor}, replace(subject, model=changed)))
        less = "give shorter --lengths or a smaller --batch-tokens"
        return Portion(header=run, subjects=subjects, tasks=tasks, seeds=config.seeds, less=less)

    portions = [partial(portion, *one) for one in zip(config.models, runs, strict=True)]
    return sweep(portions, records=config.records, work=work, told=told)


def _named(config: Any) -> tuple[list[str], Any]:
    """The tasks by name, each once; those that are not clearhead's own are given to lm_eval."""
    words = parted(config.tasks)
    named = list(dict.fromkeys(word if word in TASKS else HARNESS for word in words))
    theirs = [word for word in words if word not in TASKS]
    tasks = tuple(parted((*config.lm_eval.tasks, *theirs)))
    if HARNESS in named and tasks:
        check_names(tasks, config.lm_eval.include_path, others=TASKS)
        config = replace(config, lm_eval=replace(config.lm_eval, tasks=tasks))
    return named, config


def _tasks(config: Any, source: str, named: list[str], model: Any) -> dict[str, Task]:
    """The tasks with their options, where the model can do them."""
    masked = "MaskedLM" in type(model).__name__
    names = named or [MASKED if masked else "perplexity"]
    if misfits := [name for name in names if (name == MASKED) != masked]:
        does = "hidden tokens: its task is masked" if masked else "the next token: leave masked out"
        raise ClearheadError(f"{misfits[0]} is not for {source}, which predicts {does}")
    return {name: TASKS[name](**vars(getattr(config, name))) for name in names}


def _variants(config: Any) -> list[tuple[str, float | None]]:
    """The rope scalings, each with its factor; "none" has none."""
    kinds = [
        choose("rope scaling", kind, (NONE, *SCALINGS)) for kind in parted(config.rope_scaling)
    ]
    takes = [kind for kind in kinds if kind != NONE]
    if takes and not config.factors:
        raise ClearheadError(f"rope scaling {takes[0]} takes a factor: for example --factors 2 4 8")
    factors = dict.fromkeys(config.factors)
    return [(NONE, None)] * (NONE in kinds) + [(kind, one) for kind in takes for one in factors]


def _lengths(given: tuple[int, ...], model: Any, tasks: Mapping[str, Task]) -> tuple[int, ...]:
    if all(name in WITHOUT_LENGTH for name in tasks):
        return ()
    if given:
        return tuple(sorted(set(given)))
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is None:
        raise ClearheadError(
            f"{type(model).__name__} does not say for which length it was trained: give --lengths"
        )
    return tuple(multiple * trained for multiple in (1, 2, 4, 8))


def _header(config: Any, model: str) -> Line:
    """The run's line: what the training run said of itself, where the model is part of one."""
    made = run_of(model)
    name = made.get("run") or Path(model).resolve().name
    settings = {key: value for key, value in asdict(config).items() if key != "data"}
    return {
        "run": name,
        "preset": made.get("description", {}).get("preset") or str(name).partition("/")[0],
        "size": "",
        "seed": made.get("seed", 0),
        "label": config.label,
        "train": made.get("config", {"tokens": 0}),
        "evaluation": settings,
    }
