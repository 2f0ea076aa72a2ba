"""Requests for claims: what is refused, and the arms that a claim asks for."""

from functools import partial

import pytest

from .conftest import call

_call = partial(call, "reproduce")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a claim, a family, an experiment or all"),
        (("retrofit", "--scale", "paper"), "unknown scale of retrofit 'paper'"),
        (("sink", "--scale", "paper"), "unknown scale of sink 'paper'"),
        (("diff/table22",), "did you mean diff/table2"),
        (("sas", "--judge", "x.jsonl"), "judge reads records of all claims"),
    ],
)
def test_requests_that_nothing_decides_are_refused(words, said, capsys):
    assert _call(*words) == 2
    assert said in capsys.readouterr().err


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
