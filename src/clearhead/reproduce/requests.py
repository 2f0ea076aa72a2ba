"""Requests: the experiments that names ask for, and what options change of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.eval.options import HallucinationOptions
from clearhead.experiments.configs import FinetuneJob
from clearhead.experiments.sweep_configs import EvaluateSettings, SweepConfig
from clearhead.reproduce.claims import claims
from clearhead.reproduce.contrasts import ALL, Claim, trained_arms
from clearhead.reproduce.experiments import EXPERIMENTS, Experiment
from clearhead.reproduce.options import Changes
from clearhead.reproduce.study import WHOLE, Study

EVERYTHING = "all"  # claims


def choose_studies(names: Sequence[str], scale: str) -> list[tuple[Experiment, tuple[str, ...]]]:
    """Each experiment asked for, once, with the patterns of its arms to run.

    Of several claims those without arms at the scale are left out.

    Raises:
        ClearheadError: no name, an unknown one, or one without arms at the scale.
    """
    if not names:
        raise ClearheadError("give a claim, a family, an experiment or all: --list prints them")
    wanted: dict[str, set[str]] = {}
    for name in names:
        if name in EXPERIMENTS:
            choose(f"scale of {name}", scale, EXPERIMENTS[name].scales)
            wanted[name] = {ALL}
            continue
        chosen = [one for one in claims() if name in (one.name, *one.also, one.family, EVERYTHING)]
        if not chosen:
            places = [place for one in claims() for place in (one.name, *one.also, one.family)]
            choose("experiment or claim", name, [*EXPERIMENTS, *dict.fromkeys(places), EVERYTHING])
        there = [claim for claim in chosen if has_arms(claim, scale)]
        if not there:
            study, first = EXPERIMENTS[chosen[0].study], chosen[0]
            scales = ", ".join(one for one in study.scales if has_arms(first, one))
            raise ClearheadError(
                f"{name} has no arms at {scale}: its experiment, {study.name}, has them at {scales}"
            )
        for claim in there:
            wanted.setdefault(claim.study, set()).update(claim.arms)
    return [
        (one, (ALL,) if ALL in wanted[one.name] else tuple(sorted(wanted[one.name])))
        for one in EXPERIMENTS.values()
        if one.name in wanted
    ]


def has_arms(claim: Claim, scale: str) -> bool:
    """True if the scale has both arms of one of the claim's comparisons."""

    def there(patterns: Iterable[str]) -> bool:
        return any(arms_of(claim.study, scale, trained_arms(patterns)))

    return any(there(one.ours.arm) and there(one.theirs.arm) for one in claim.contrasts)


def arms_of(study: str, scale: str, patterns: Iterable[str]) -> Iterator[Study]:
    """The arms of an experiment that a pattern names; none where it has not that scale."""
    patterns = tuple(patterns)
    return (one for one in trials(study, scale) if _named(one.name, patterns))


@cache
def trials(study: str, scale: str) -> tuple[Study, ...]:
    """The arms of an experiment; none where it has not that scale."""
    experiment = EXPERIMENTS[study]
    return tuple(experiment.trials(scale)) if scale in experiment.scales else ()


def chosen(
    names: Sequence[str], scale: str, output: Path | None, by: Changes
) -> dict[str, list[Study]]:
    """The arms of each experiment asked for, changed, each with the experiment's folder.

    Raises:
        ClearheadError: as `choose_studies`; for a pattern that names no arm or question.
    """
    studies, found = choose_studies(names, scale), dict[str, list[Study]]()
    there = {"arms": dict[str, None](), "questions": dict[str, None]()}
    for study, patterns in studies:
        folder = output or Path("runs") / f"{study.name}-{scale}"
        if output is not None and len(studies) > 1:
            folder = output / study.name
        there["arms"] |= dict.fromkeys(one.name for one in trials(study.name, scale))
        if arms := [*arms_of(study.name, scale, by.only or patterns)]:
            there["questions"] |= dict.fromkeys(name for one in arms for name in one.questions)
            found[study.name] = [changed(replace(one, output=folder), by) for one in arms]
    for kind, patterns in (("arms", by.only), ("questions", by.questions)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in there[kind]):
                known = ", ".join(there[kind]) or "none"
                raise ClearheadError(f"{pattern!r} names none of the {kind}, which are {known}")
    return found


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def changed(one: Study, by: Changes) -> Study:
    """An arm with a command's seeds, texts and questions.

    Raises:
        ClearheadError: for a model to start from, of an arm that begins anew.
    """
    questions: dict[str, Any] = {
        name: replace(x, track=by.track) if isinstance(x, FinetuneJob) else x
        for name, x in one.questions.items()
        if _named(name, by.questions or (ALL,))
    }
    if by.test_data:
        questions |= _on_text(questions, by.test_data)
    settings: dict[str, Any] = {"track": by.track, "questions": questions}
    settings |= {"seeds": by.seeds or one.seeds, "data": by.data or one.data.data}
    if by.tokens is not None:
        settings |= {"tokens": by.tokens, "sweep_tokens": min(one.sweep_tokens, by.tokens)}
    if by.base is not None:
        if one.base is None:
            raise ClearheadError(f"--from has no effect on {one.name}, which begins anew")
        settings |= {"base": by.base, "start": None}
    return one.changed(**settings)


def _on_text(questions: Mapping[str, Any], sources: tuple[str, ...]) -> dict[str, Any]:
    """The questions about text on another one: where some read the hub's, those alone."""
    asked = {name: one for name, one in questions.items() if isinstance(one, SweepConfig)}
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
