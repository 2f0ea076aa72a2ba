"""Which numbers a claim compares; what keeps it from a verdict: no defect, a ratio to nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from clearhead.papers import book
from clearhead.papers.contrasts import Judgement, lower, number
from clearhead.records.loading import parse
from clearhead.records.runs import Records

from .making import near, outcomes, recorded, verdict

SCHEMES = ("w8a8-coarse", "w6a6-coarse", "w4a4-coarse")
OURS, BOTH = "transformer · orthoadam", "transformer · normalizer softmax1 · orthoadam"
RIVALS = ("transformer · muon", "transformer · epilogue gate", "transformer · qk_norm rmsnorm")


def _records(arms: Mapping[str, Mapping[str, Sequence[float]]]) -> Records:
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
    records = _records(
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
    [
        ("best", (True, False)),
        ("second", (False, False)),
        ("unmeasured", (False, False)),
        ("lead", (True, True)),
    ],
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
    assert outcome.at_edge == marks


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
