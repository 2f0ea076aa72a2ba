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
from clearhead.experiments.sweep_configs import EvaluateSettings, SweepConfig
from clearhead.reproduce.claims import claims
from clearhead.reproduce.contrasts import ALL, Claim, trained_arms
from clearhead.reproduce.experiments import EXPERIMENTS, Experiment
from clearhead.reproduce.options import Changes
from clearhead.reproduce.study import WHOLE, Study

EVERYTHING = "all"  # claims
READING = ("perplexity", "hits", "masked")
"""Tasks of evaluations that read text."""
LEFT_OUT = {
    "softmax1/table1": ("a table of the paper that our notes do not have", "softmax1/cause"),
    "softmax1/figure1": ("a figure of the paper that our notes do not have", "softmax1/share"),
    "softmax1/table4": (
        "kurtosis under OrthoAdam and softmax-1 with LayerNorm and with a norm of one gain",
        "softmax1/kurtosis",
    ),
}
"""Tables and figures that no experiment makes again: what each shows, and the claim nearest."""
PROBES: Mapping[str, Any] = {
    "seeds": (997,),
    "tokens": 10**15,
    "data": ("?",),
    "test_data": ("?",),
    "track": ("wandb",),
}
"""Option → a value that no experiment has. `--from` is refused where any arm begins anew."""


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
def trials(study: str, scale: str) -> tuple[Study, ...]:
    """The arms of an experiment; none where it has not that scale."""
    experiment = EXPERIMENTS[study]
    return tuple(experiment.trials(scale)) if scale in experiment.scales else ()


def _claims(name: str) -> list[Claim]:
    """The claims that a name asks for; none where it is an experiment's.

    Raises:
        ClearheadError: an unknown name, or a table or figure that no experiment makes again.
    """
    if name in LEFT_OUT:
        shows, nearest = LEFT_OUT[name]
        raise ClearheadError(
            f"no experiment for {name}, {shows}: the claim nearest to it is {nearest}"
        )
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
    studies: Mapping[str, Sequence[Study]], by: Changes, *, say: Callable[[str], None]
) -> dict[str, list[Study]]:
    """The arms of each experiment with a command's seeds, texts and questions.

    Raises:
        ClearheadError: for an option that has no effect on any of them; of some it is said.
    """
    asked = {study: [_asked(one, by.questions) for one in arms] for study, arms in studies.items()}
    for option, probe in PROBES.items():
        if not getattr(by, option):
            continue
        other = Changes(**{option: probe})
        idle = [
            study
            for study, arms in asked.items()
            if all(_jobs(one) == _jobs(_changed(one, other)) for one in arms)
        ]
        line = f"--{option.replace('_', '-')} has no effect on {', '.join(idle)}"
        if 0 < len(idle) < len(asked):
            say(line)
        elif idle:
            narrowed = [
                f" {name} {' '.join(map(repr, patterns))}"
                for name, patterns in (("--only", by.only), ("--questions", by.questions))
                if patterns
            ]
            line += " with" * bool(narrowed) + "".join(narrowed)
            raise ClearheadError(f"{line}: leave it out")
    return {study: [_changed(one, by) for one in arms] for study, arms in asked.items()}


def _jobs(one: Study) -> list[Any]:
    """The jobs of a seed, without where they lie and what they read of each other."""
    jobs = [*one.runs(next(iter(one.tries), None), one.seeds[0])]
    jobs += [job.after for job in jobs if job.after is not None]
    return [{**job.settings, "track": getattr(job.config, "track", ())} for job in jobs]


def _asked(one: Study, patterns: Sequence[str]) -> Study:
    """The arm with those questions alone that a pattern names, where there are patterns."""
    questions = {
        name: question
        for name, question in one.questions.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns or (ALL,))
    }
    return replace(one, questions=questions)


def _changed(one: Study, by: Changes) -> Study:
    settings: dict[str, Any] = {"track": by.track}
    questions = {
        name: replace(x, track=by.track) if isinstance(x, FinetuneJob) else x
        for name, x in one.questions.items()
    }
    if by.seeds:
        settings["seeds"] = by.seeds
    if by.tokens is not None:
        settings["train"] = replace(one.train, tokens=by.tokens)
        settings["sweep_tokens"] = min(one.sweep_tokens, by.tokens)
    if by.data:
        settings["data"] = replace(one.data, data=by.data)
    if by.base is not None:
        if one.base is None:
            raise ClearheadError(f"--from has no effect on {one.name}, which begins anew")
        settings |= {"base": by.base, "start": None}
    if by.test_data:
        questions |= _on_text(one, by.test_data)
    return replace(one, questions=questions, **settings)


def _on_text(study: Study, sources: tuple[str, ...]) -> dict[str, Any]:
    """The questions on other texts: where some read the hub's, those alone."""
    asked: dict[str, Any] = {name: one for name, one in study.questions.items() if _reads(one)}
    hub = {
        name: one
        for name, one in asked.items()
        if any(source.startswith("hf:") for source in (*one.data.data, *_documents(one)))
    }
    return {name: _reading(one, sources) for name, one in (hub or asked).items()}


def _reads(question: Any) -> bool:
    """True where a question is about text or documents, which others may take the place of."""
    if not isinstance(question, EvaluateSettings):
        return isinstance(question, SweepConfig)
    return bool(_documents(question)) or any(name in READING for name in question.tasks)


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
