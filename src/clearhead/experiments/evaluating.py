"""An evaluation as a value: which model, which tasks, on what text; and its run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from clearhead.data import prepare
from clearhead.errors import ClearheadError, choose
from clearhead.eval import TASKS, WITHOUT_LENGTH, Subject, Task, Texts, check_names, parted
from clearhead.eval.options import OPTIONS
from clearhead.experiments.building import refuse_tokenizer
from clearhead.experiments.checkpoints import load_model
from clearhead.experiments.evaluation import NONE, Scaling, Watcher, evaluate, scalings
from clearhead.models import SCALINGS
from clearhead.records.lock import hold_file
from clearhead.train.folder import RUN_FILE, read_record

MASKED, HARNESS = "masked", "lm_eval"


def run_evaluation(
    config: Any, *, watcher: Watcher, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure every cell that the configuration names; return their lines.

    Raises:
        ClearheadError: for a model, a text or options that do not work.
    """
    named, config = _named(config)
    variants = _variants(config)
    refuse_tokenizer(config.data)
    with hold_file(config.records):
        return _evaluate(config, named, variants, watcher, say)


def _evaluate(
    config: Any,
    named: list[str],
    variants: list[Scaling],
    watcher: Watcher,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    model, tokenizer = load_model(
        config.model, kinds=("causal", "masked"), trust_remote_code=config.trust_remote_code
    )
    tasks = _tasks(config, named, model)
    subject = Subject(
        model=model,
        tokenizer=tokenizer,
        texts=Texts(
            lambda: prepare(config.data, tokenizer=tokenizer, progress=say),
            ("train", "validation") if config.split == "all" else ("validation",),
        ),
        lengths=_lengths(config.lengths, model, tasks),
        tokens=config.tokens,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        kept=config.records and config.records.with_name(f"{config.records.name}.texts"),
    )
    return evaluate(
        subject,
        tasks,
        variants,
        run=_header(config),
        records=config.records,
        watcher=watcher,
    )


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


def _tasks(config: Any, named: list[str], model: Any) -> dict[str, Task]:
    """The tasks with their options, where all that is asked for has an effect."""
    masked = "MaskedLM" in type(model).__name__
    names = named or [MASKED if masked else "perplexity"]
    if misfits := [name for name in names if (name == MASKED) != masked]:
        does = "hidden tokens: its task is masked" if masked else "the next token: leave masked out"
        raise ClearheadError(f"{misfits[0]} is not for {config.model}, which predicts {does}")
    for name, kind in OPTIONS.items():
        if name not in names and getattr(config, name) != kind():
            raise ClearheadError(
                f"options of {name} have no effect without it: add it to --tasks, or leave them out"
            )
    return {name: TASKS[name](**vars(getattr(config, name))) for name in names}


def _variants(config: Any) -> list[Scaling]:
    kinds = [
        choose("rope scaling", kind, (NONE, *SCALINGS)) for kind in parted(config.rope_scaling)
    ]
    factors = []
    for word in parted(config.factors):
        try:
            factors.append(float(word))
        except ValueError:
            raise ClearheadError(f"factor {word!r} is not a number above 1") from None
    return scalings(kinds, factors)


def _lengths(given: tuple[int, ...], model: Any, tasks: Mapping[str, Task]) -> tuple[int, ...]:
    if all(name in WITHOUT_LENGTH for name in tasks):
        if given:
            raise ClearheadError(
                f"lengths have no effect on {', '.join(tasks)}, whose texts are as long as they "
                "are: leave them out"
            )
        return ()
    if given:
        return tuple(sorted(set(given)))
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is None:
        raise ClearheadError(
            f"{type(model).__name__} does not say for which length it was trained: give --lengths"
        )
    return tuple(multiple * trained for multiple in (1, 2, 4, 8))


def _header(config: Any) -> dict[str, Any]:
    """The run's line: what the training run said of itself, where the model is part of one."""
    folder = Path(config.model)
    made: dict[str, Any] = {}
    for place in (folder, folder.parent):
        if (place / RUN_FILE).is_file():
            made = read_record(place)
            break
    name = config.name or made.get("run") or folder.resolve().name
    settings = {key: value for key, value in asdict(config).items() if key != "data"}
    return {
        "kind": "run",
        "run": name,
        "preset": made.get("description", {}).get("preset") or str(name).partition("/")[0],
        "size": "",
        "seed": made.get("seed", 0),
        "label": config.label,
        "train": made.get("config", {}),
        "evaluation": settings,
    }
