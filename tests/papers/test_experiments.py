"""The experiments as code, a short function each that says what it changes; and their options."""

import inspect
from dataclasses import replace

import pytest

from clearhead.papers.claims import CLAIMS
from clearhead.papers.requests import EXPERIMENTS, changed, chosen
from clearhead.papers.study import Study


@pytest.mark.parametrize("study", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_an_experiment_is_one_short_function_that_marks_its_intervention(study):
    lines = inspect.getsource(study.arms).splitlines()
    assert len(lines) < 30
    assert any("intervention" in line.lower() for line in lines)


def test_every_table_and_figure_that_a_claim_stands_for_is_a_name_of_it():
    named = [(claim, place) for claim in CLAIMS for place in (claim.name, *claim.also)]
    assert len(named) == len({place for _, place in named}) > len(CLAIMS)
    for claim, place in named:
        assert place.startswith(f"{claim.family}/")
        assert chosen([place], "tiny") == chosen([claim.name], "tiny")


def test_each_seed_starts_from_a_rotation_that_it_draws(tmp_path):
    """Else the spread over seeds would leave out how lucky the only rotation was."""
    trials = {one.name: one for one in EXPERIMENTS["retrofit"].arms("small")}

    def made(name: str, *seeds: int) -> list[str]:
        one = replace(trials[name], output=tmp_path)
        if seeds:
            one = replace(one, seeds=seeds)
        firsts = [one.runs(1e-5 if one.tries else None, seed)[0] for seed in one.seeds]
        for seed, first in zip(one.seeds, firsts, strict=True):
            assert first.after.config.seed == seed * ("turned" in name)
        firsts += [one.attempt(1e-5)] * one.is_swept
        return [*dict.fromkeys(first.after.name for first in firsts if first.after is not None)]

    turned = "models/rotate=residual-values-down-prefix=-n"
    for name in ("prefix turned", "prefix turned trained"):
        assert made(name) == [turned, f"{turned}-seed=1", f"{turned}-seed=2"]
        assert made(name.replace("turned", "turned equal")) == [
            f"{turned}{seed}-equal" for seed in ("", "-seed=1", "-seed=2")
        ]
        searched = turned.replace("prefix=-n", "prefix=auto")
        assert made(name.replace("prefix turned", "searched turned learned")) == [
            f"{searched}{seed}-learned-equal" for seed in ("", "-seed=1", "-seed=2")
        ]
    # A sweep starts from the same rotation, whichever seeds count.
    assert made("prefix turned trained", 1, 2) == [f"{turned}-seed=1", f"{turned}-seed=2", turned]
    assert made("prefix turned", 1) == [f"{turned}-seed=1"]
    assert made("prefix rotated") == ["models/rotate=down-prefix=-n"]


def test_deep_outliers_are_sought_with_the_gains_that_they_were_seen_with():
    """At kurtosis 100 SAS-P's norms had a gain for each channel (results/blocks.jsonl)."""
    norms = {one.name: one.side.model["norm"] for one in EXPERIMENTS["outliers-deep"].arms("small")}
    assert norms.pop("sas-p · norm rmsnorm") == "rmsnorm"
    assert {*norms.values()} == {"rmsnorm-single"}
    (plain,) = (one for one in EXPERIMENTS["blocks"].arms("small") if one.key == "24 layers/sas-p")
    assert "norm" not in plain.side.model


# Option, its value, and the experiment, scale and arm whose jobs it changes.
OPTIONS = [
    ("seeds", (7,), "blocks", "tiny", "sas"),
    ("tokens", 8192, "blocks", "tiny", "sas"),
    ("data", ("own.txt",), "long-context", "paper", "alibi"),
    ("data", ("own.txt",), "signal", "tiny", "sas"),
    ("base", "own-model", "retrofit", "tiny", "prefix turned"),
    ("test_data", ("own.txt",), "retrofit", "tiny", "as it is"),
    ("test_data", ("own.txt",), "outliers", "tiny", "transformer"),
    ("questions", ("bits",), "retrofit", "tiny", "dense"),
]


def _configs(one: Study) -> list[object]:
    jobs = one.runs(next(iter(one.tries), None), one.seeds[0])
    return [job.config for job in (*jobs, *(job.after for job in jobs if job.after))]


@pytest.mark.parametrize(("option", "value", "study", "scale", "arm"), OPTIONS)
def test_an_option_changes_a_job(option, value, study, scale, arm):
    (one,) = (one for one in EXPERIMENTS[study].arms(scale) if one.name == arm)
    before = _configs(one)
    after = _configs(changed(one, **{option: value}))
    assert after != before
    said = str(after)
    for word in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
        assert option in ("seeds", "questions") or word in said


def test_own_text_takes_the_place_of_the_hubs_where_there_is_some():
    """Code is a question of its own, and stays."""
    one = EXPERIMENTS["retrofit"].arms("tiny")[0]
    asked = changed(one, test_data=("own.txt",)).questions
    assert asked["bits"].data == replace(one.questions["bits"].data, data=("own.txt",))
    assert asked["bits"].data.validation == 0.999
    assert asked["code"] == one.questions["code"]
