"""Requests: the experiments that names ask for, and what options change of them.

An option that changes nothing of what is asked for is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.eval.options import HallucinationOptions
from clearhead.experiments.configs import FinetuneJob
from clearhead.experiments.sweep_configs import DiagnoseConfig, EvaluateSettings, SweepConfig
from clearhead.reproduce import EXPERIMENTS, Experiment, rows
from clearhead.reproduce.claims import ALL, Claim, claims, trained_arms
from clearhead.reproduce.options import Changes
from clearhead.reproduce.trials import TEXT, WHOLE, Table, Trial

EVERYTHING = "all"  # claims
READING = ("perplexity", "hits", "masked")
"""Tasks of evaluations that read text; needles and allocation do too where text is their filler."""


def choose_studies(names: Sequence[str], scale: str) -> list[tuple[Experiment, tuple[str, ...]]]:
    """Each experiment asked for, once, with the patterns of its arms to run; none is all of them.

    Of several claims those without arms at the scale are left out (`without_arms`).

    Raises:
        ClearheadError: no name, an unknown one, a table or figure that no experiment makes again,
            or one without arms at the scale.
    """
    if not names:
        raise ClearheadError("give a claim, a family, an experiment or all: --list prints them")
    wanted: dict[str, set[str]] = {}
    for name in names:
        chosen = _claims(name)
        if not chosen:
            choose(f"scale of {name}", scale, EXPERIMENTS[name].scales)
            wanted[name] = {ALL}
            continue
        there = [claim for claim in chosen if has_arms(claim, scale)]
        if not there:
            first = chosen[0]
            scales = (one for one in EXPERIMENTS[first.study].scales if has_arms(first, one))
            raise ClearheadError(
                f"{name} has no arms at {scale}: its experiment, {first.study}, has them at "
                f"{', '.join(scales)}"
            )
        for claim in there:
            wanted.setdefault(claim.study, set()).update(claim.arms)
    return [
        (one, () if ALL in wanted[one.name] else tuple(sorted(wanted[one.name])))
        for one in EXPERIMENTS.values()
        if one.name in wanted
    ]


def without_arms(names: Iterable[str], scale: str) -> list[str]:
    """The claims asked for that have no arms at the scale."""
    asked = {claim.name: claim for name in names for claim in _claims(name)}
    return [name for name, claim in asked.items() if not has_arms(claim, scale)]


def has_arms(claim: Claim, scale: str) -> bool:
    """True if the scale has both arms of one of the claim's comparisons."""
    known = [one.name for one in trials(claim.study, scale)]

    def named(patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(arm, one) for one in trained_arms(patterns) for arm in known)

    return any(named(one.ours.arm) and named(one.theirs.arm) for one in claim.contrasts)


@cache
def trials(study: str, scale: str) -> tuple[Trial, ...]:
    """The trials of an experiment; none where it has not that scale."""
    experiment = EXPERIMENTS[study]
    return tuple(experiment.trials(scale)) if scale in experiment.scales else ()


def _claims(name: str) -> list[Claim]:
    """The claims that a name asks for; none where it is an experiment's.

    Raises:
        ClearheadError: an unknown name, or a table or figure that no experiment makes again.
    """
    for place in rows("left_out"):
        if name == place["name"]:
            nearest = f"the claim nearest to it is {place['nearest']}"
            raise ClearheadError(f"no experiment for {name}, {place['shows']}: {nearest}")
    families = {claim.family for claim in claims()}
    places = [place for claim in claims() for place in (claim.name, *claim.also)]
    choose("experiment or claim", name, [*EXPERIMENTS, *families, *places, EVERYTHING])
    if name in EXPERIMENTS:
        return []
    return [
        claim for claim in claims() if name in (claim.name, *claim.also, claim.family, EVERYTHING)
    ]


# Changes


def change(
    studies: Mapping[str, Sequence[Trial]], by: Changes, *, say: Callable[[str], None]
) -> dict[str, list[Trial]]:
    """The trials of each experiment with a command's seeds, texts and questions.

    Raises:
        ClearheadError: for an option that has no effect on any of them; of some it is said.
    """
    asked = {
        study: [_asked(one, by.questions) for one in trials] for study, trials in studies.items()
    }
    for option, has_effect in EFFECTS.items():
        idle = [study for study, trials in asked.items() if not any(map(has_effect, trials))]
        if not getattr(by, option) or not idle:
            continue
        line = f"--{option.replace('_', '-')} has no effect on {', '.join(idle)}"
        if len(idle) < len(asked):
            say(line)
            continue
        narrowed = [
            f" {name} {' '.join(map(repr, patterns))}"
            for name, patterns in (("--only", by.only), ("--questions", by.questions))
            if patterns
        ]
        raise ClearheadError(f"{line}{' with' * bool(narrowed)}{''.join(narrowed)}: leave it out")
    return {study: [_changed(one, by) for one in trials] for study, trials in asked.items()}


def _asked(trial: Trial, patterns: Sequence[str]) -> Trial:
    """The trial with those questions alone that a pattern names, where there are patterns."""
    questions = {
        name: one
        for name, one in trial.table.questions.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns or (ALL,))
    }
    return replace(trial, table=replace(trial.table, questions=questions))


def _is_trained(trial: Trial) -> bool:
    return bool(trial.rates)


def _is_drawn(trial: Trial) -> bool:
    """True where a seed draws something: the order of a text, a rotation, weights."""
    rotated = trial.conversion is not None and trial.conversion.is_drawn
    return _is_trained(trial) or rotated or _is_fresh(trial)


def _is_fresh(trial: Trial) -> bool:
    """True where untrained weights are diagnosed; they read the training text."""
    questions = trial.table.questions.values()
    begins_anew = not trial.rates and trial.config.base is None
    return begins_anew and any(isinstance(one, DiagnoseConfig) for one in questions)


def _reads_training_text(trial: Trial) -> bool:
    calibrated = trial.conversion is not None and trial.conversion.calibrate == TEXT
    return _is_trained(trial) or calibrated or _is_fresh(trial)


def _reads_other_text(trial: Trial) -> bool:
    questions = trial.table.questions.values()
    return not _is_fresh(trial) and any(map(_reads, questions))


def _reads(question: Any) -> bool:
    """True where a question is about text or documents, which others may take the place of."""
    if not isinstance(question, EvaluateSettings):
        return isinstance(question, SweepConfig)
    return bool(_documents(question)) or any(
        name in READING or getattr(getattr(question, name, None), "filler", "") == "text"
        for name in question.tasks
    )


EFFECTS: Mapping[str, Callable[[Trial], bool]] = {
    "seeds": _is_drawn,
    "tokens": _is_trained,
    "data": _reads_training_text,
    "test_data": _reads_other_text,
    "track": _is_trained,
}
"""Option → whether it has an effect on a trial. `--from` is refused where any arm begins anew."""


def _changed(trial: Trial, by: Changes) -> Trial:
    table, config, begins = trial.table, trial.config, trial.base
    settings: dict[str, Any] = {"track": by.track}
    questions: dict[str, Any] = {
        name: replace(one, track=by.track) if isinstance(one, FinetuneJob) else one
        for name, one in table.questions.items()
    }
    if by.seeds:
        settings["seeds"] = by.seeds
    if by.tokens is not None:
        settings["train"] = replace(config.train, tokens=by.tokens)
        table = replace(table, sweep_tokens=min(table.sweep_tokens, by.tokens))
    if by.data:
        settings["data"] = replace(config.data, data=by.data)
    if by.base is not None:
        if config.base is None:
            raise ClearheadError(f"--from has no effect on {trial.name}, which begins anew")
        settings["base"], begins = by.base, None
    if by.test_data:
        questions |= _on_text(table, by.test_data)
    table = replace(table, config=replace(config, **settings), questions=questions)
    return replace(trial, table=table, base=begins)


def _on_text(table: Table, sources: tuple[str, ...]) -> dict[str, Any]:
    """The questions on other texts: where some read the hub's, those alone."""
    asked: dict[str, Any] = {name: one for name, one in table.questions.items() if _reads(one)}
    hub = {
        name: one
        for name, one in asked.items()
        if any(source.startswith("hf:") for source in (*one.data.data, *_documents(one)))
    }
    return {name: _reading(one, sources) for name, one in (hub or asked).items()}


def _documents(question: Any) -> tuple[str, ...]:
    """The sources of the documents that a question has summarised."""
    return getattr(question, "hallucination", HallucinationOptions()).files


def _reading(question: Any, sources: tuple[str, ...]) -> Any:
    """The question on other documents where it has some, or else on other text."""
    if _documents(question):
        return replace(question, hallucination=replace(question.hallucination, files=sources))
    text = replace(question.data, data=sources)
    if isinstance(question, EvaluateSettings):
        return replace(question, data=text, split="all")
    return replace(question, data=replace(text, validation=WHOLE))
