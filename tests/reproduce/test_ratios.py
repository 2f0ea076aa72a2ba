"""The gains of trained values and projections: verdicts on records that are known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.records.loading import load
from clearhead.reproduce import stages
from clearhead.reproduce.claims import judged
from clearhead.reproduce.contrasts import Judgement
from clearhead.reproduce.requests import EXPERIMENTS

from .making import outcomes


def _ratios(folder: Path, ends: dict[str, dict[str, float]]):
    """Joined records of `ratios`: every model starts at 0.2 and ends at these numbers."""
    trials = [replace(one, output=folder) for one in EXPERIMENTS["ratios"].arms("tiny")]
    jobs = stages.runs(trials, {one.key: 1e-3 for one in trials if one.tries})
    for job in (jobs := [job for job in jobs if job.name.startswith("evaluations/")]):
        end = ends[job.arm.partition(" ")[0]] if job.after else {"all": 0.2, "first": 0.2}
        spread = 0.001 * job.seed if job.after else 0.0
        measures = [
            {"metric": "beta_over_alpha", "value": end["all"] + spread},
            {"metric": "beta_over_alpha_values", "layer": 0, "value": end["first"] + spread},
            {"metric": "beta_over_alpha_values", "layer": 1, "value": 9.0},  # of none
        ]
        lines = [{"kind": "run", "study": "diagnosis", "run": "one"}]
        lines += [{"kind": "measure", "run": "one", "cell": "c", **one} for one in measures]
        job.records.parent.mkdir(parents=True)
        job.records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load([stages.collect(jobs, folder / "records.jsonl")])


def test_without_the_other_label_there_is_nothing_to_compare_with(tmp_path):
    """Least of all the model itself."""
    ends = {arm: {"all": 0.1, "first": 0.1} for arm in ("sas", "transformer")}
    records = _ratios(tmp_path, ends)
    assert len(outcomes("sas/figure4", records)) == 2
    assert outcomes("sas/figure4", records.labelled("ratios")) == []


@pytest.mark.parametrize(
    ("name", "sas", "pre_ln", "verdict"),
    [
        ("sas/figure4", (0.02, 0.1), 0.3, Judgement.HOLDS),
        ("sas/figure4", (0.02, 0.04), 0.3, Judgement.DOES_NOT_HOLD),  # the first goes back too
        ("sas/figure4", (0.08, 0.1), 0.3, Judgement.DOES_NOT_HOLD),  # lower, and not small
        ("sas/figure4", (0.05, 0.1), 0.3, Judgement.UNDECIDED),
        ("sas/figure22", (0.02, 0.1), 0.3, Judgement.HOLDS),
        ("sas/figure22", (0.02, 0.1), 0.1, Judgement.DOES_NOT_HOLD),
        ("sas/figure22", (0.4, 0.1), 0.3, Judgement.DOES_NOT_HOLD),  # it grows without, too
    ],
)
def test_gains_of_values_are_judged_against_their_start(name, sas, pre_ln, verdict, tmp_path):
    ends = {"sas": sas, "transformer": (pre_ln, pre_ln)}
    given = {arm: dict(zip(("all", "first"), pair, strict=True)) for arm, pair in ends.items()}
    records = _ratios(tmp_path, given)
    found = {claim.name: (rows, one) for claim, rows, one in judged({"r": records})}
    rows, judgement = found[name]
    assert len(rows) == 2
    assert rows[0].outcomes[0].source == "r, ratios"
    assert judgement is verdict
