"""Records of one comparison, taken together; which of their numbers it compares, and what keeps it
from a verdict: no defect, a ratio to nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from clearhead.papers import book
from clearhead.papers.claims import Pooled, pool, verdict_of
from clearhead.papers.contrasts import LOSS, Contrast, Judgement, higher, lower, no_worse, number
from clearhead.records.loading import parse
from clearhead.records.runs import Records

from .making import near, of_losses, outcomes, recorded, verdict

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


SCHEMES = ("w8a8-coarse", "w6a6-coarse", "w4a4-coarse")
OURS, BOTH = "transformer · orthoadam", "transformer · normalizer softmax1 · orthoadam"
RIVALS = ("transformer · muon", "transformer · epilogue gate", "transformer · qk_norm rmsnorm")


def _of_schemes(arms: Mapping[str, Mapping[str, Sequence[float]]]) -> Records:
    """The perplexity that each scheme adds to 20, by arm and seed."""
    one = {"metric": "perplexity"}
    lines = {
        arm: [{**one, "value": [20.0] * 3}]
        + [{**one, "scheme": s, "value": [20 + cost for cost in v]} for s, v in schemes.items()]
        for arm, schemes in arms.items()
    }
    return recorded(lines, label="outliers")


@pytest.mark.parametrize(("cost", "expected"), [(0.1, Judgement.UNTESTED), (5.0, Judgement.HOLDS)])
def test_what_few_bits_cost_decides_nothing_where_they_cost_the_baseline_nothing(cost, expected):
    """However well the seeds agree. A rival may cost little: it is the baseline that counts."""
    none = [0.011, 0.012, 0.013]
    costs = [cost, cost + 0.001, cost + 0.002]
    cured = {key: [0.021, 0.022, 0.023] for key in SCHEMES}
    rotated = {f"hadamard-{one}": cured[one] for one in SCHEMES}
    ours = (OURS, f"{OURS} · rotation_share size", BOTH)
    records = _of_schemes(
        {"transformer": dict.fromkeys(SCHEMES, costs) | rotated}
        | {arm: dict.fromkeys(SCHEMES, none) for arm in ours}
        | dict.fromkeys(RIVALS, cured)
    )
    for name in ("softmax1/table3", "softmax1/rivals"):
        for one in outcomes(name, records):
            assert one.difference.p < 0.01
            assert verdict(one) is expected
    text = "".join(book.markdown({"r": records}))
    said = "| not counted: added perplexity of the baseline is below 0.5"
    assert (text.count(said) > 7) == (expected is Judgement.UNTESTED)


def test_a_ratio_to_a_number_that_may_be_zero_is_undecided_and_says_why():
    speeds = {"differential": [5.0, 5.1, 4.9], "transformer": [0.1, 9.0, 2.0]}
    one = {"metric": "tokens_per_second"}
    records = recorded({arm: [{**one, "value": x}] for arm, x in speeds.items()}, label="speed")
    (outcome,) = outcomes("diff/speed", records)
    assert verdict(outcome, threshold=1.0) is Judgement.UNDECIDED
    text = "".join(book.markdown({"r": records}))
    assert " | undecided, the number compared with may be zero, margin 0.12 |" in text
    assert "inf" not in text[text.index("## The claims") : text.index("Names and measures")]


@pytest.mark.parametrize(
    ("edge", "marks"),
    [("best", [1, 0]), ("second", [0, 0]), ("unmeasured", [0, 0]), ("lead", [1, 1])],
)
def test_a_number_is_marked_by_the_rates_of_the_runs_that_it_is_of(edge, marks):
    """And of those that it is compared with as a lead; not by those of a pattern that is not its
    first with numbers, nor of runs without any."""
    lines = []
    for arm in ("best", "second", "unmeasured", "transformer", "lead"):
        train = {"learning_rate": 4e-3 if arm == edge else 2e-3}
        head = {"arm": arm, "preset": arm, "seed": 0, "train": train}
        lines.append({"kind": "run", "run": arm, **head, "swept": [1e-3, 2e-3, 4e-3]})
        if arm != "unmeasured":
            lines.append({"kind": "measure", "run": arm, "metric": "loss", "value": 2.0})
    what = replace(number("loss"), minus=number("loss").of("lead"))
    contrast = lower("", what, ("unmeasured", "*best", "second"), "transformer")
    (outcome,) = contrast.outcomes({"r": parse(lines)})
    assert [*outcome.at_edge] == marks


def test_windows_that_open_documents_are_not_joined_with_those_anywhere_in_a_text():
    """There the begin token stands first: `elimination` measures both."""
    one = {"metric": "kurtosis", "tokens": "first"}
    arms = {
        arm: [
            {**one, "value": near(anywhere, 0.1, 2)},
            {**one, "at": "documents", "value": near(opening, 0.1, 2)},
            {**one, "at": "documents", "metric": "kurtosis_rotated", "value": near(2.8, 0.1, 2)},
        ]
        for arm, anywhere, opening in (("transformer", 3.2, 11.0), (OURS, 3.0, 3.4))
    }
    records = recorded(arms)
    (first,) = outcomes("softmax1/kurtosis", records)
    assert (first.ours.mean, first.theirs.mean) == (pytest.approx(3.05), pytest.approx(3.25))
    assert first.missing  # no outliers to remove there
    assert all(one.missing for one in outcomes("softmax1/move", records))
    opening = number("kurtosis", tokens="first", at="documents")
    (asked,) = lower("", opening, OURS, "transformer", least=4).outcomes({"r": records})
    assert (asked.ours.mean, asked.theirs.mean) == (pytest.approx(3.45), pytest.approx(11.05))
    assert not asked.missing


def test_windows_that_open_documents_count_where_nothing_else_was_measured():
    one = {"metric": "null_mass", "map": "softmax", "at": "documents"}
    masses = [
        {**one, "position": position, "value": near(value, 0.01, 2)}
        for position, value in ((32, 0.2), (256, 0.1))
    ]
    records = recorded({"softmax1": masses}, label="backcopy")
    (outcome,) = outcomes("softmax1/fading", records)
    assert outcome.ours.mean < outcome.theirs.mean


def _trained(arms: Mapping[str, tuple[float, float]], metric: str = "loss") -> Records:
    """A number and a rate by arm; a vocabulary of 64."""
    parts = [
        recorded(
            {arm: [{"metric": metric, "length": n, "value": near(value)} for n in (8, 32)]},
            train={"sequence_length": 8, "learning_rate": rate},
            model={"vocab_size": 64},
        )
        for arm, (value, rate) in arms.items()
    ]
    return Records(runs=tuple(run for part in parts for run in part.runs))


@pytest.mark.parametrize(("loss", "learnt"), [(2.0, True), (2.1, False)])
def test_a_loss_counts_where_both_perplexities_are_below_the_root_of_the_vocabulary(loss, learnt):
    """exp(2.08) is 8; wherever in a text the loss is read."""
    records = {"r": _trained({"sas": (1.9, 1e-3), "transformer": (loss, 2e-3)})}
    for times in (1, 4):
        what = number("loss", times=times)
        (one,) = lower("", what, "sas", "transformer").outcomes(records)
        assert one.missing == ("" if learnt else "a model had hardly learnt")
        assert verdict(one) is (Judgement.HOLDS if learnt else Judgement.UNTESTED)


@pytest.mark.parametrize("metric", ["kurtosis", "largest_activation", "first_token_argmax_share"])
def test_outliers_are_compared_at_one_rate(metric):
    differ = "" if metric.startswith("first") else "the rates differ (0.001, 0.002)"
    contrast = lower("", number(metric), "sas", "transformer")
    for rate, own, missing in ((1e-3, False, ""), (2e-3, False, differ), (2e-3, True, "")):
        records = _trained({"sas": (3.0, 1e-3), "transformer": (9.0, rate)}, metric)
        (one,) = replace(contrast, own_rates=own).outcomes({"r": records})
        assert one.missing == missing
