"""Options of `clearhead reproduce`: each changes a job of every experiment, or is refused."""

from dataclasses import replace
from functools import cache

import pytest

from clearhead.errors import ClearheadError
from clearhead.reproduce.experiments import EXPERIMENTS
from clearhead.reproduce.options import Changes
from clearhead.reproduce.requests import change
from clearhead.reproduce.study import Study

UNTRAINED = {"memory", "signal"}
# Neither evaluations nor diagnoses of text: numbers of the training, or fine-tuning.
WITHOUT_TEXT = {
    *("differential-ablations", "differential-scaling", "blocks", "blocks-books", "blocks-scaling"),
    *("blocks-longer", "depth", "speed", "encoders"),
}
# Questions that read no text of --test-data, of experiments where others do.
UNREAD = {("abilities", "answers"), ("long-context", "passkeys"), ("retrofit", "passkeys")}
# Option, its value, and the experiments on which it has no effect.
OPTIONS = {
    "seeds": ((7,), {"memory"}),
    "tokens": (40_000_000_000, UNTRAINED),
    "base": ("own-model", {*EXPERIMENTS} - {"retrofit"}),
    "data": (("own.txt",), {"memory"}),
    "test_data": (("own.txt",), WITHOUT_TEXT | UNTRAINED),
    "track": (("tensorboard",), UNTRAINED),
}


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_a_job_or_is_refused(option: str, scale: str) -> None:
    value, idle = OPTIONS[option]
    changes = Changes(**{option: value})
    for one in EXPERIMENTS.values():
        if scale not in one.scales:
            continue
        trials = _trials(one.name, scale)
        if one.name in idle:
            flag = {"base": "from"}.get(option, option.replace("_", "-"))
            with pytest.raises(ClearheadError, match=f"^--{flag} has no effect on "):
                _changed(one.name, trials, changes)
        else:
            assert _jobs(_changed(one.name, trials, changes)) != _jobs(trials), one.name


@pytest.mark.parametrize("study", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_questions_leave_out_the_others(study) -> None:
    """With each question alone an option works or is refused: none passes without an effect."""
    trials = _trials(study.name, "small")
    for question in {name for one in trials for name in one.questions}:
        alone = _changed(study.name, trials, Changes(questions=(question,)))
        assert {name for one in alone for name in one.questions} == {question}
        own = Changes(questions=(question,), test_data=("own.txt",))
        if (study.name, question) in UNREAD or study.name in WITHOUT_TEXT | UNTRAINED:
            with pytest.raises(ClearheadError, match=f"^--test-data has no effect on {study.name}"):
                _changed(study.name, trials, own)
        else:
            assert _jobs(_changed(study.name, trials, own)) != _jobs(alone), (study.name, question)


def test_of_several_experiments_those_are_named_on_which_an_option_has_no_effect() -> None:
    said = list[str]()
    studies = {name: _trials(name, "tiny") for name in ("memory", "speed")}
    changed = change(studies, Changes(tokens=8192), say=said.append)
    assert said == ["--tokens has no effect on memory"]
    assert {one.train.tokens for one in changed["speed"]} == {8192}
    del studies["speed"]
    with pytest.raises(ClearheadError, match=r"^--tokens has no effect on memory: leave it out"):
        change(studies, Changes(tokens=8192), say=said.append)


@cache
def _trials(study: str, scale: str) -> list[Study]:
    return list(EXPERIMENTS[study].trials(scale))


def _changed(study: str, trials: list[Study], by: Changes) -> list[Study]:
    return change({study: trials}, by, say=lambda line: None)[study]


def _jobs(trials: list[Study]) -> set[str]:
    """The commands of the first arm of each kind: its preparations, a run and the questions."""
    first = {(bool(one.tries), one.conversion, *one.questions): one for one in trials[::-1]}
    jobs = []
    for one in first.values():
        rate, seed = next(iter(one.tries), None), one.seeds[0]
        jobs += [*one.preparations(), *replace(one, tries=one.tries[:1]).runs(rate, seed)]
    return {*map(str, jobs)}
