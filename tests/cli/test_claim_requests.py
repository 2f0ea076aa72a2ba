"""Requests for claims: what is refused, and the arms that a claim asks for."""

from functools import partial

import pytest

from clearhead.papers.claims import CLAIMS
from clearhead.papers.requests import EXPERIMENTS, chosen

from .conftest import call, refusal

_call = partial(call, "reproduce")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a claim, a family, an experiment or all"),
        (("encodes",), "did you mean encoders"),
        (("blocks", "--only", "sass"), "'sass' names none of the arms, which are transformer, "),
        (("encoders", "--questions", "rta"), "none of the questions, which are rte, banking77"),
        (("encoders", "--only", "*rope*", "--questions", "rte"), "questions, which are none"),
        (("blocks", "--jobs", "0"), "jobs is 0: give a whole number of at least 1"),
        (("blocks", "--from", "my-model"), "no effect on transformer, which begins anew"),
        (("retrofit", "--scale", "paper"), "unknown scale of retrofit 'paper'"),
        (("diff/table22",), "did you mean diff/table2"),
        (
            ("coca/bidirectional", "--scale", "paper"),
            "coca/bidirectional has no arms at paper: its experiment, encoders, has them at tiny, "
            "small",
        ),
    ],
)
def test_requests_that_nothing_decides_are_refused(words, said, capsys):
    assert said in refusal(capsys, "reproduce", *words)


def test_the_list_says_what_each_experiment_asks(capsys):
    assert _call("--list") == 0
    out = capsys.readouterr().out.splitlines()
    asked = "blocks: Which parts of a block can go? arXiv 2311.01906; tiny, small, paper; "
    cost = "at tiny 72 runs, 14.7 M tokens, about 21 min of training on two cores"
    cost += ", sweeps may add up to 36 runs"
    assert asked + cost in out
    own = "blocks, at tiny 12 runs, 2.46 M tokens, about 3 min of training on two cores"
    own += ", sweeps may add up to 6 runs"
    says = "A small gain of the MLP branch is better than a gain of 1."
    assert f"sas/residual, sas/figure13: {says} [{own}]" in out
    assert len(out) == len(EXPERIMENTS) + len(CLAIMS)


@pytest.mark.parametrize(
    ("claim", "arms"),
    [
        ("sas/glue", ["encoders/bert", "encoders/bert-sas", "encoders/bert-sas-p"]),
        ("sas/residual", ["6 layers/sas", "6 layers/sas · mlp_gain 1.0"]),
    ],
)
def test_a_claim_asks_for_its_own_arms_only(claim, arms, tmp_path):
    ((_, studies),) = chosen([claim], "tiny", tmp_path).items()
    assert [one.key for one in studies] == arms
    assert {one.output for one in studies} == {tmp_path}
