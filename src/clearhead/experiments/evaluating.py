"""The evaluation of models by tasks, on a text."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.data import prepare
from clearhead.errors import ClearheadError, choose
from clearhead.eval import TASKS, WITHOUT_LENGTH, Subject, Task, Texts, check_names, parted
from clearhead.experiments.run_setup import load_model, run_of, text_of
from clearhead.experiments.sweep_configs import short_names
from clearhead.measure.sweep import Portion, sweep
from clearhead.models import SCALINGS, with_rope_scaling
from clearhead.models.loading import resolved
from clearhead.progress import Work
from clearhead.records.runs import Line

MASKED, HARNESS, NONE = "masked", "lm_eval", "none"


def run_evaluation(
    config: Any,
    *,
    say: Callable[[str], None],
    work: Work | None = None,
    told: Callable[[list[Line]], object] | None = None,
) -> list[Line]:
    """Measure every cell that the configuration names, model by model; return the records.

    `work` and `told` are those of `sweep`.

    Raises:
        ClearheadError: for a model, a text or options that do not work.
    """
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
    factors = []
    for word in parted(config.factors):
        try:
            factors.append(float(word))
        except ValueError:
            raise ClearheadError(f"factor {word!r} is not a number above 1") from None
    takes = [kind for kind in kinds if kind != NONE]
    if takes and not factors:
        raise ClearheadError(f"rope scaling {takes[0]} takes a factor: for example --factors 2 4 8")
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
    name = config.name or made.get("run") or Path(model).resolve().name
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
