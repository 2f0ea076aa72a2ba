"""Requests for claims: what is refused, and the arms that a claim asks for."""

from functools import partial

import pytest

from clearhead.reproduce import claims as claims_module
from clearhead.reproduce import experiments
from clearhead.reproduce.claims import claims
from clearhead.reproduce.experiments import EXPERIMENTS

from .conftest import call, refusal

_call = partial(call, "reproduce")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a claim, a family, an experiment or all"),
        (("retrofit", "--scale", "paper"), "unknown scale of retrofit 'paper'"),
        (("sink", "--scale", "paper"), "unknown scale of sink 'paper'"),
        (("diff/table22",), "did you mean diff/table2"),
        (("softmax1/share", "--scale", "paper"), "has no arms at paper: its experiment, sink, has"),
        (
            ("coca/bidirectional", "--scale", "paper"),
            "coca/bidirectional has no arms at paper: its experiment, encoders, has them at smoke, "
            "tiny, small",
        ),
    ],
)
def test_requests_that_nothing_decides_are_refused(words, said, capsys):
    assert said in refusal(capsys, "reproduce", *words)


def test_of_a_family_the_claims_without_arms_at_a_scale_are_named(tmp_path, capsys):
    words = ["coca", "--scale", "paper", "--output", str(tmp_path), "--dry-run"]
    assert _call(*words) == 0
    printed = capsys.readouterr()
    said = "left out, without arms at paper: coca/memory, coca/bidirectional"
    assert said in printed.err.splitlines()
    assert "clearhead compare coca-slack --size coca-350m" in printed.out


def test_the_list_says_what_each_experiment_asks(capsys):
    assert _call("--list") == 0
    out = capsys.readouterr().out.splitlines()
    asked = "blocks: Which parts of a block can go? arXiv 2311.01906; smoke, tiny, small, paper; "
    cost = "at tiny 72 runs, 14.7 M tokens, about 21 min of training on two cores"
    cost += ", sweeps may add up to 36 runs"
    assert asked + cost in out
    own = "blocks, at tiny 12 runs, 2.46 M tokens, about 3 min of training on two cores"
    own += ", sweeps may add up to 6 runs"
    says = "A small gain of the MLP branch is better than a gain of 1."
    assert f"sas/residual, sas/figure13: {says} [{own}]" in out
    assert len(out) == len(EXPERIMENTS) + len(claims())


def test_the_list_says_that_a_claim_has_no_arms_at_a_scale(capsys, monkeypatch):
    kept = {name: EXPERIMENTS[name] for name in ("encoders", "memory")}
    chosen = tuple(one for one in claims() if one.study in kept)
    monkeypatch.setattr(experiments, "EXPERIMENTS", kept)
    monkeypatch.setattr(claims_module, "claims", lambda: chosen)
    assert _call("--list", "--scale", "paper") == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for name, bill in (
        ("coca/bidirectional", "[encoders, no arms at paper, at tiny 12 runs, 15.6 M tokens, "),
        ("coca/memory, coca/table6", "[memory, no arms at paper, at tiny no training]"),
        ("sas/glue, sas/table2", "[encoders, at paper 9 runs, 45 G tokens, "),
    ):
        assert bill in listed[name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sas", "--judge", "x.jsonl"), "sas would have no effect with --judge: give it --output"),
        (
            ("--judge", "x.jsonl", "--scale", "small", "--from", "m"),
            "--from, --scale would have no effect with --judge: give it --output alone",
        ),
        (("--list", "--only", "sas", "--dry-run"), "--only, --dry-run would have no effect with"),
        (("--list", "blocks"), "blocks would have no effect with --list: give it --scale alone"),
    ],
)
def test_where_nothing_is_run_options_of_runs_are_refused(words, said, capsys):
    assert said in refusal(capsys, "reproduce", *words)


def test_a_claim_about_a_task_asks_for_the_arms_that_are_measured_on_it(tmp_path, capsys):
    assert _call("sas/glue", "--dry-run", "--output", str(tmp_path / "x")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[2] for line in lines if "compare" in line} == {
        *("bert", "bert-sas", "bert-sas-p")
    }


def test_a_claim_asks_for_its_own_arms_only(tmp_path, capsys):
    assert _call("sas/residual", "--dry-run", "--output", str(tmp_path / "x")) == 0
    out = capsys.readouterr().out
    assert {line.split()[2] for line in out.splitlines() if line.startswith("clearhead")} == {"sas"}
    assert "mlp_gain=1.0" in out
    assert "mlp_gain=0.3" not in out
