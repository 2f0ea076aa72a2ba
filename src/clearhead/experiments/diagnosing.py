"""Diagnosis of models on a text, as records."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from clearhead.data import Corpus
from clearhead.diagnose.diagnosis import LESS_MEMORY, DiagnosisTask
from clearhead.errors import ClearheadError
from clearhead.experiments.run_setup import load_model, own_text, text_of, untrained
from clearhead.experiments.sweep_configs import DIAGNOSIS_FILE, FRESH, DiagnoseConfig, short_names
from clearhead.measure import Portion, Subject, Texts
from clearhead.measure.sweep import sweep
from clearhead.models.catalogue import preset
from clearhead.models.inspection import dtype_name, longest_text, parameter_count, within_memory
from clearhead.models.memory import require_room
from clearhead.progress import Work
from clearhead.records.runs import DIAGNOSIS, Line

LENGTH = 512


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

    def portion(source: str, name: str) -> Portion:
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
        header = {
            "run": name,
            "parameters": parameter_count(model),
            "architecture": type(model).__name__,
            "dtype": dtype_name(model),
            "windows": task.number(subject),
            "at": config.at,
            "length": length,
            "batch_size": max(1, config.batch_tokens // length),
        }
        say(f"{name}: {header['windows']} windows")
        return Portion(
            header=header,
            subjects=[({}, subject)],
            tasks={"diagnosis": task},
            seeds=config.seeds,
            less=LESS_MEMORY,
        )

    named = zip(config.models, short_names(config.models), strict=True)
    portions = [partial(portion, *one) for one in named]
    return sweep(portions, records=config.output / DIAGNOSIS_FILE, study=DIAGNOSIS, work=work)


def _loaded(source: str, config: DiagnoseConfig, say: Callable[[str], None]) -> tuple[Any, Corpus]:
    if source.startswith(FRESH):
        torch.manual_seed(config.seeds[0])
        name, size = source.removeprefix(FRESH), config.size or "tiny"
        return untrained(name, size, config.set, config.data, say=say)
    model, tokenizer = load_model(
        source, kinds=("causal", "masked", "bare"), trust_remote_code=config.trust_remote_code
    )
    return model, own_text(config.data, tokenizer, progress=say)
