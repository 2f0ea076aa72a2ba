"""Records of one comparison, taken together, and what all runs of its two sides measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from clearhead.papers.claims import Pooled, pool, verdict_of
from clearhead.papers.contrasts import LOSS, Contrast, Judgement, higher, lower, no_worse, number
from clearhead.records.loading import parse
from clearhead.records.runs import Records

from .making import of_losses, verdict

BASE = [2.5, 2.52, 2.48]
LOWER = lower("loss", LOSS, "sas", "transformer")
HOLDS, UNDECIDED = Judgement.HOLDS, Judgement.UNDECIDED


def _pooled(*records: Sequence[float], of: Contrast = LOWER, more: int = 1) -> Pooled:
    """The records of SAS's losses, the baseline's a nat higher in each; the first times `more`."""
    sources = {
        str(n): of_losses({"sas": values, "transformer": [one + n for one in BASE]}, label="")
        for n, values in enumerate(records)
    }
    sources["0"] = of_losses({"sas": [*records[0]] * more, "transformer": BASE * more}, label="")
    return pool(of, sources)


def test_one_record_keeps_its_own_test():
    row = _pooled([2.44, 2.46, 2.45])
    (only,) = row.counted
    assert row.difference == only.difference
    assert row.agreement is None


def test_records_that_agree_decide_together_what_none_does_alone():
    row = _pooled([2.44, 2.47, 2.455], [3.44, 3.47, 3.455])
    p = [one.difference.p for one in row.counted]
    assert p == [pytest.approx(p[0])] * 2
    assert p[0] > 0.03
    assert row.difference.p < p[0] / 3
    assert row.difference.mean == pytest.approx(-0.045)
    low, high = row.difference.interval
    assert low < -0.045 < high < 0
    assert row.agreement == pytest.approx(1)
    assert row.judgement(0.0277) is HOLDS
    assert {verdict(one, 0.0277) for one in row.outcomes} == {UNDECIDED}


def test_records_that_disagree_are_named_so_and_do_not_cancel_silently():
    row = _pooled([2.3, 2.31, 2.29], [3.7, 3.71, 3.69])
    assert row.judgement(0.05) is UNDECIDED
    assert row.agreement < 0.001


def test_a_record_of_more_runs_weighs_more():
    records = [2.4, 2.42, 2.38], [3.6, 3.62, 3.58]
    assert _pooled(*records).difference.mean == pytest.approx(0.0, abs=1e-9)
    row = _pooled(*records, more=2)
    assert [one.weight for one in row.counted] == [6, 3]
    assert row.difference.mean < -0.01


def test_runs_of_two_records_count_once():
    record = of_losses({"sas": [2.44, 2.47, 2.455], "transformer": BASE}, label="")
    row = pool(LOWER, dict.fromkeys("ab", record))
    assert [one.source for one in row.counted] == ["a"]
    assert len(row.outcomes) == 2
    assert row.difference == row.counted[0].difference


def test_one_seed_counts_only_where_nothing_else_does():
    one = of_losses({"sas": [9.0], "transformer": [2.5]}, label="")
    three = of_losses({"sas": [2.3, 2.31, 2.29], "transformer": BASE}, label="")
    assert [x.source for x in pool(LOWER, {"one": one, "three": three}).counted] == ["three"]
    assert pool(LOWER, {"one": one}).judgement(1.0) is UNDECIDED
    assert pool(LOWER, {}).judgement(1.0) is Judgement.UNTESTED


def test_main_effects_are_compared_within_a_seed():
    """Differences of 0.03, 0.05 and 0.04: t = 0.04 / (0.01 / sqrt 3) with two degrees."""
    records = {"r": of_losses({"sas": [2.03, 3.05, 4.04], "transformer": [2.0, 3.0, 4.0]})}
    (plain,) = LOWER.outcomes(records)
    (within,) = replace(LOWER, blocked=True).outcomes(records)
    assert plain.difference.p > 0.9
    assert within.difference.p == pytest.approx(0.0202, abs=1e-4)
    assert within.difference.interval == pytest.approx((0.0152, 0.0648), abs=1e-4)
    assert verdict(within) is Judgement.DOES_NOT_HOLD


def test_a_margin_is_tested_by_every_record():
    within = no_worse("loss", LOSS, "sas", "transformer", by=0.05)
    row = _pooled([2.49, 2.52, 2.51], [3.49, 3.52, 3.51], of=within)
    assert row.difference.against == 0.05
    assert row.difference.interval[1] < 0.05
    assert row.judgement(0.05) is HOLDS


def test_a_claim_holds_where_all_its_comparisons_do_and_is_untested_where_none_counts():
    no, untested = Judgement.DOES_NOT_HOLD, Judgement.UNTESTED
    assert verdict_of([HOLDS, HOLDS]) is HOLDS
    assert verdict_of([HOLDS, untested]) is UNDECIDED
    assert verdict_of([untested, untested]) is untested
    assert verdict_of([UNDECIDED, untested]) is UNDECIDED
    assert verdict_of([HOLDS, no, UNDECIDED]) is no


CONTRAST = higher("", number("m"), "differential*", "transformer*")


def _parsed(found: Mapping[tuple[str, int], Mapping[int, float]]) -> dict[str, Records]:
    """Records of {(arm, seed): {length: value}}."""
    lines: list[dict[str, Any]] = []
    for (arm, seed), by_length in found.items():
        run = f"{arm}/seed{seed}"
        lines.append({"kind": "run", "run": run, "arm": arm, "preset": arm, "seed": seed})
        one = {"kind": "measure", "run": run, "metric": "m"}
        lines += [{**one, "length": length, "value": v} for length, v in by_length.items()]
    return {"": parse(lines)}


def test_a_length_that_some_seeds_lack_counts_in_none():
    runs = {
        ("transformer", 0): {64: 0.1, 128: 0.9},
        ("transformer", 1): {64: 0.2},
        ("differential", 0): {64: 0.3, 256: 0.7},
        ("differential", 1): {64: 0.4, 256: 0.8},
    }
    (outcome,) = CONTRAST.outcomes(_parsed(runs))
    assert outcome.theirs.mean == pytest.approx(0.15)
    assert outcome.ours.mean == pytest.approx(0.35)
    # Without a length that all share there is no comparison.
    runs = {("transformer", 0): {64: 0.1}, ("differential", 0): {128: 0.3}}
    assert not [*CONTRAST.outcomes(_parsed(runs))]


def test_a_main_effect_leaves_out_a_seed_that_lacks_one_of_its_arms():
    runs = {
        (f"{side} · {other}", seed): {64: value}
        for side in ("differential", "transformer")
        for seed in (0, 1)
        for other, value in (("rope", 0.2), ("alibi", 0.6))
    }
    del runs["differential · rope", 1]
    (outcome,) = CONTRAST.outcomes(_parsed(runs))
    assert (outcome.ours.n, outcome.ours.mean) == (1, pytest.approx(0.4))
    assert (outcome.theirs.n, outcome.theirs.mean) == (2, pytest.approx(0.4))
