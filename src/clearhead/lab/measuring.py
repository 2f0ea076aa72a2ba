"""Evaluation, diagnosis and simulated quantisation of models, as records."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from clearhead.data import Corpus, DataConfig, prepare
from clearhead.diagnose.diagnosis import LESS_MEMORY, DiagnosisTask
from clearhead.errors import ClearheadError, choose
from clearhead.eval.hallucination import HallucinationTask
from clearhead.eval.harness import HarnessTask, check_names
from clearhead.eval.perplexity_task import HitsTask, MaskedTask, PerplexityTask
from clearhead.eval.retrieval import AllocationTask, NeedlesTask, PasskeyTask, RecallTask
from clearhead.eval.shots import ShotsTask
from clearhead.lab.runs import fitted, load_model, new_model, run_of, text_of
from clearhead.lab.sweep_configs import FRESH, DiagnoseConfig, QuantizeConfig, short_names
from clearhead.measure.sweep import Portion, Subject, Texts, sweep
from clearhead.models import SCALINGS, with_rope_scaling
from clearhead.models.conversion import require_convertible
from clearhead.models.inspection import dtype_name, longest_text, parameter_count, within_memory
from clearhead.models.loading import best_device, load_config, require_room, resolved
from clearhead.models.planning import preset
from clearhead.progress import Work
from clearhead.quantize import every, left_out, linear_layers, scheme
from clearhead.quantize.measure import QuantizationTask
from clearhead.records.files import hold_file
from clearhead.records.loading import Store
from clearhead.records.runs import COMPARISON, DIAGNOSIS, QUANTIZATION, Line
from clearhead.settings.eval import OPTIONS, parted
from clearhead.terminal import say
from clearhead.train import TrainConfig

ALL = "all"
LENGTH = 512  # of a diagnosis
MASKED, HARNESS = "masked", "lm_eval"
_TASKS = (
    *(PerplexityTask, PasskeyTask, NeedlesTask, RecallTask, HitsTask),
    *(AllocationTask, ShotsTask, MaskedTask, HarnessTask, HallucinationTask),
)
TASKS: Any = dict(zip(OPTIONS, _TASKS, strict=True))

Load = Callable[[str, str], Portion]  # loads a model by its source, and its name in records


def measure(
    config: Any, *, work: Work | None = None, lines: list[Line] | None = None
) -> list[Line]:
    """Evaluate, diagnose or quantise the models of a SweepConfig, one after the other; return
    the records, which its file and `lines` get as they are made."""
    if isinstance(config, DiagnoseConfig):
        study, load = DIAGNOSIS, _diagnosis(config)
    elif isinstance(config, QuantizeConfig):
        study, load = QUANTIZATION, _quantization(config)
    else:
        study, load = COMPARISON, _evaluation(config)
    lines, work = [] if lines is None else lines, work or Work()
    names = short_names(config.models)
    with nullcontext() if config.records is None else hold_file(config.records):
        store = Store(config.records, study)
        for source, name in zip(config.models, names, strict=True):
            for done in sweep(load(source, name), config.seeds, store, len(names), work):
                lines += done
    return lines


def _quantization(config: QuantizeConfig) -> Load:
    names = [name for word in config.scheme for name in (every() if word == ALL else [word])]
    task = QuantizationTask(schemes=tuple(map(scheme, dict.fromkeys(names))), length=config.length)
    data = text_of(config.data, config.models)
    check_models(config)

    def load(source: str, name: str) -> Portion:
        model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
        # What transformers warns of from here on, as of attention out of reach, is a result.
        logging.set_verbosity_error()
        texts = Texts(lambda: prepare(data, tokenizer=tokenizer, progress=say), ("validation",))
        # In batches of one window: a scale of a batch would be no one text's.
        sizes: Any = {"lengths": (config.length,), "batch_tokens": config.length}
        sizes |= {"tokens": config.tokens, "seed": config.seeds[0]}
        subject = Subject(model=model, tokenizer=tokenizer, texts=texts, **sizes)
        layers, read = linear_layers(model), task.texts(subject)
        weights = {one.get_parameter("weight") for one in layers.values()}  # shared ones once
        calibration = f"{len(read.calibration)} windows of the training split"
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
            "calibration": calibration if read.calibration else None,
        }
        advice = f"give a smaller --length than {config.length}"
        return header, [({}, subject)], {"quantization": task}, advice

    return load


def check_models(config: QuantizeConfig) -> None:
    """Refuse a missing path, a quantised model, and one too large for the memory, before any model
    is measured."""
    for source in config.models:
        require_convertible(source, trust_remote_code=config.trust_remote_code)
        require_room(source, "quantize", copies=2)


def _diagnosis(config: DiagnoseConfig) -> Load:
    if config.set and not any(one.startswith(FRESH) for one in config.models):
        raise ClearheadError("--set has no effect on a trained model: diagnose init:NAME")
    data = own = text_of(config.data, config.models)
    if any(source.startswith(FRESH) for source in config.models):  # the tokenizer is for those
        own = replace(data, tokenizer=None, vocabulary=DataConfig.vocabulary)
    for source in config.models:
        if source.startswith(FRESH):  # a mistyped name is refused before the other is measured
            preset(source.removeprefix(FRESH), config.size or "tiny", **config.set)
        else:
            require_room(source, "diagnose", copies=1)

    def load(source: str, name: str) -> Portion:
        with within_memory(LESS_MEMORY):
            if source.startswith(FRESH):
                torch.manual_seed(config.seeds[0])
                corpus, named = prepare(data, progress=say), source.removeprefix(FRESH)
                keys = fitted(named, config.size or "tiny", corpus, TrainConfig(), **config.set)
                model = new_model(keys).to(best_device()).eval()
            else:
                kinds = ("causal", "masked", "bare")
                model, tokenizer = load_model(source, kinds, config.trust_remote_code)
                corpus = prepare(own, tokenizer=tokenizer, progress=say, closed=False)
        limits = longest_text(model), getattr(model.config, "max_position_embeddings", None)
        length = config.length or min(LENGTH, next(filter(None, limits), LENGTH))
        task = DiagnosisTask(length=length, windows=config.windows, at=config.at)
        sizes: Any = {"tokens": length * config.windows, "batch_tokens": config.batch_tokens}
        sizes |= {"lengths": (length,), "seed": config.seeds[0]}
        texts = Texts(lambda: corpus, ("validation",))
        subject = Subject(model=model, tokenizer=corpus.tokenizer, texts=texts, **sizes)
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
        return header, [({}, subject)], {"diagnosis": task}, LESS_MEMORY

    return load


def _evaluation(config: Any) -> Load:
    words = parted(config.tasks)
    # Each once; those that are not clearhead's own are given to lm_eval.
    named = list(dict.fromkeys(word if word in TASKS else HARNESS for word in words))
    theirs = tuple(parted([*config.lm_eval.tasks, *(one for one in words if one not in TASKS)]))
    if HARNESS in named and theirs:
        check_names(theirs, config.lm_eval.include_path, others=TASKS)
        config = replace(config, lm_eval=replace(config.lm_eval, tasks=theirs))
    kinds = [
        choose("rope scaling", kind, ("none", *SCALINGS)) for kind in parted(config.rope_scaling)
    ]
    scaled = [kind for kind in kinds if kind != "none"]
    if scaled and not config.factors:
        raise ClearheadError(f"rope scaling {scaled[0]} takes a factor: give --factors, say 2 4 8")
    factors = dict.fromkeys(config.factors)
    for source in config.models:  # a wrong name is refused before the first is measured
        load_config(resolved(source), trust_remote_code=config.trust_remote_code)
    headers = {source: _header(config, resolved(source)) for source in config.models}
    alike = len({header["run"] for header in headers.values()}) < len(headers)

    def load(source: str, name: str) -> Portion:
        header = headers[source]
        if alike:
            header["run"] = header["preset"] = name
        model, tokenizer = load_model(source, ("causal", "masked"), config.trust_remote_code)
        masked = "MaskedLM" in type(model).__name__
        names = named or [MASKED if masked else "perplexity"]
        if misfits := [task for task in names if (task == MASKED) != masked]:
            does = "hidden tokens: its task is masked" if masked else "the next token"
            raise ClearheadError(f"{misfits[0]} is not for {source}, which predicts {does}")
        tasks = {task: TASKS[task](**vars(getattr(config, task))) for task in names}
        lengths = tuple(sorted({*config.lengths}))
        if not lengths and {*tasks} != {HARNESS}:  # whose texts have a length of their own
            if (trained := getattr(model.config, "max_position_embeddings", None)) is None:
                raise ClearheadError(f"{name} does not say its training length: give --lengths")
            lengths = tuple(multiple * trained for multiple in (1, 2, 4, 8))

        def text() -> Corpus:
            data = text_of(config.data, config.models)
            return prepare(data, tokenizer=tokenizer, progress=say)

        texts = Texts(text, ("train",) * (config.split == "all") + ("validation",))
        sizes: Any = {"tokens": config.tokens, "batch_tokens": config.batch_tokens}
        sizes |= {"lengths": lengths, "seed": config.seeds[0]}
        subject = Subject(model=model, tokenizer=tokenizer, texts=texts, **sizes)
        header |= {"weights": subject.weights}  # those of a scaled variant differ
        header |= {"model": {"from": source, **model.config.to_diff_dict()}}
        subjects = [({"scaling": "none", "factor": None}, subject)] * ("none" in kinds)
        for kind, factor in itertools.product(scaled, factors):
            changed = replace(subject, model=with_rope_scaling(model, kind, factor=factor))
            subjects.append(({"scaling": kind, "factor": factor}, changed))
        return header, subjects, tasks, "give shorter --lengths or a smaller --batch-tokens"

    return load


def _header(config: Any, model: str) -> Line:
    """The run's line: what the training run said of itself, where the model is part of one."""
    training = run_of(model)
    name = training.get("run") or Path(model).resolve().name
    return {
        "run": name,
        "preset": training.get("description", {}).get("preset") or str(name).partition("/")[0],
        "size": "",
        "seed": training.get("seed", 0),
        "label": config.label,
        "train": training.get("config", {"tokens": 0}),
        "evaluation": {key: value for key, value in asdict(config).items() if key != "data"},
    }
