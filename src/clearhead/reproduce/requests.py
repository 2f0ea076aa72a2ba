"""Requests: the experiments that names ask for, and what options change of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.experiments.sweep_configs import EvaluateSettings, SweepConfig
from clearhead.reproduce.claims import CLAIMS
from clearhead.reproduce.contrasts import ALL, Claim, trained_arms
from clearhead.reproduce.experiments import EXPERIMENTS
from clearhead.reproduce.options import Changes
from clearhead.reproduce.study import WHOLE, Study

EVERYTHING = "all"  # claims


def choose_studies(names: Sequence[str], scale: str) -> dict[str, set[str]]:
    """Each experiment asked for, in the book's order, with the patterns of its arms to run.

    Of several claims those without arms at the scale are left out.

    Raises:
        ClearheadError: no name, an unknown one, or one without arms at the scale.
    """
    if not names:
        raise ClearheadError("give a claim, a family, an experiment or all: --list prints them")
    wanted: dict[str, set[str]] = {name: set() for name in EXPERIMENTS}
    for name in names:
        if name in EXPERIMENTS:
            choose(f"scale of {name}", scale, EXPERIMENTS[name].scales)
            wanted[name] = {ALL}
            continue
        chosen = [one for one in CLAIMS if name in (one.name, *one.also, one.family, EVERYTHING)]
        if not chosen:
            places = [place for one in CLAIMS for place in (one.name, *one.also, one.family)]
            choose("experiment or claim", name, [*EXPERIMENTS, *dict.fromkeys(places), EVERYTHING])
        there = [claim for claim in chosen if has_arms(claim, scale)]
        if not there:
            study, first = EXPERIMENTS[chosen[0].study], chosen[0]
            scales = ", ".join(one for one in study.scales if has_arms(first, one))
            raise ClearheadError(
                f"{name} has no arms at {scale}: its experiment, {study.name}, has them at {scales}"
            )
        for claim in there:
            wanted[claim.study] |= claim.arms
    return {name: patterns for name, patterns in wanted.items() if patterns}


def has_arms(claim: Claim, scale: str) -> bool:
    """True if the scale has both arms of one of the claim's comparisons."""

    def there(patterns: Iterable[str]) -> bool:
        return any(arms_of(claim.study, scale, trained_arms(patterns)))

    return any(there(one.ours.arm) and there(one.theirs.arm) for one in claim.contrasts)


def arms_of(study: str, scale: str, patterns: Iterable[str] = (ALL,)) -> Iterator[Study]:
    """The arms of an experiment that a pattern names; none where it has not that scale."""
    patterns = tuple(patterns)
    return (one for one in _arms(study, scale) if _named(one.name, patterns))


@cache
def _arms(study: str, scale: str) -> tuple[Study, ...]:
    experiment = EXPERIMENTS[study]
    return tuple(experiment.arms(scale)) if scale in experiment.scales else ()


def chosen(
    names: Sequence[str], scale: str, output: Path | None, by: Changes
) -> dict[str, list[Study]]:
    """The arms of each experiment asked for, changed, each with the experiment's folder.

    Raises:
        ClearheadError: as `choose_studies`; for a pattern that names no arm or question.
    """
    studies, found = choose_studies(names, scale), dict[str, list[Study]]()
    there = {"arms": dict[str, None](), "questions": dict[str, None]()}
    for study, patterns in studies.items():
        folder = output or Path("runs") / f"{study}-{scale}"
        if output is not None and len(studies) > 1:
            folder = output / study
        there["arms"] |= dict.fromkeys(one.name for one in arms_of(study, scale))
        if arms := [*arms_of(study, scale, by.only or patterns)]:
            there["questions"] |= dict.fromkeys(name for one in arms for name in one.questions)
            found[study] = [changed(replace(one, output=folder), by) for one in arms]
    for kind, asked in (("arms", by.only), ("questions", by.questions)):
        for pattern in asked:
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
        name: x for name, x in one.questions.items() if _named(name, by.questions or (ALL,))
    }
    if by.test_data:  # where some questions read the hub's text, in place of those alone
        sweeps = {name: x for name, x in questions.items() if isinstance(x, SweepConfig)}
        hub = [
            name
            for name, x in sweeps.items()
            if any(source.startswith("hf:") for source in (*x.data.data, *_documents(x)))
        ]
        questions |= {name: _reading(sweeps[name], by.test_data) for name in hub or sweeps}
    settings: dict[str, Any] = {"questions": questions}
    settings |= {"seeds": by.seeds or one.seeds, "data": by.data or one.data.data}
    if by.tokens is not None:
        settings |= {"tokens": by.tokens, "sweep_tokens": min(one.sweep_tokens, by.tokens)}
    if by.base is not None:
        if one.base is None:
            raise ClearheadError(f"--from has no effect on {one.name}, which begins anew")
        settings["base"] = by.base
    return one.changed(**settings)


def _documents(question: Any) -> tuple[str, ...]:
    """The sources of the documents that a question has summarised."""
    return getattr(getattr(question, "hallucination", None), "files", ())


def _reading(question: Any, sources: tuple[str, ...]) -> Any:
    """The question on other documents where it has some, or else on other text."""
    if _documents(question):
        return replace(question, hallucination=replace(question.hallucination, files=sources))
    text = replace(question.data, data=sources)
    if isinstance(question, EvaluateSettings):
        return replace(question, data=text, split="all")
    return replace(question, data=replace(text, validation=WHOLE))
