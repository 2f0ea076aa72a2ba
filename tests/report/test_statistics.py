"""Mean, spread, intervals and verdicts against numbers worked out by hand, and by scipy."""

from dataclasses import replace
from fractions import Fraction

import pytest
import scipy.stats

from clearhead.records.intervals import Component, component, of_numbers
from clearhead.report import Page
from clearhead.report.statistics import (
    Difference,
    Verdict,
    alike_trials,
    compare,
    family,
    summarize,
    threshold_of,
)


def account(*differences: Difference) -> str:
    page = Page(title="", kicker="")
    page.differences = [*differences]
    return page.account


def test_a_summary_by_hand():
    summary = summarize([1.0, 2.0, 6.0])
    assert (summary.n, summary.mean) == (3, 3.0)
    # Deviations -2, -1, 3: squares sum to 14, over n - 1 = 2 is 7.
    assert summary.deviation == pytest.approx(7**0.5)
    half = 4.30265 * 7**0.5 / 3**0.5
    assert summary.interval == pytest.approx((3 - half, 3 + half), rel=1e-5)
    one = summarize([5.0])
    assert (one.n, one.mean, one.deviation, one.interval) == (1, 5.0, None, None)
    assert summarize([]) is None


def test_a_difference_is_welchs():
    # Means 2 and 6; variances 1 and 4 over 3 seeds each: error² 1/3 + 4/3 = 5/3,
    # degrees (5/3)² / ((1/3)²/2 + (4/3)²/2) = 50/17.
    found = compare([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert found.mean == -4.0
    half = scipy.stats.t.ppf(0.975, 50 / 17) * (5 / 3) ** 0.5
    assert found.interval == pytest.approx((-4 - half, -4 + half))
    assert found.decidable == pytest.approx(half)
    assert half == pytest.approx(4.155, abs=1e-3)
    assert found.verdict is Verdict.UNDECIDED
    expected = scipy.stats.ttest_ind([1, 2, 3], [4, 6, 8], equal_var=False).pvalue
    assert found.p == pytest.approx(expected)


def test_seeds_are_not_paired():
    """What changes together in both arms is no evidence: only the order of data is shared."""
    found = compare([1.1, 5.1, 9.1], [1.0, 5.0, 9.0])
    assert found.verdict is Verdict.UNDECIDED
    assert compare([9.1, 1.1, 5.1], [1.0, 5.0, 9.0]) == found


def test_a_single_seed_of_either_arm_decides_nothing():
    for variant, baseline in (([1.0], [100.0]), ([1.0], [100.0, 100.0]), ([1.0, 1.0], [100.0])):
        found = compare(variant, baseline)
        assert found.verdict is Verdict.ONE_SEED
        assert found.p is None
    assert compare([], [1.0, 2.0]) is None


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.1, 0.1, 0.1]])
def test_seeds_that_all_agree_tell_no_spread_and_decide_nothing(values):
    """Neither that two arms differ, nor that they are equal. A mean of 0.1 is not exactly 0.1."""
    for baseline in (values, [0.3, 0.3, 0.3]):
        found = compare(values, baseline)
        assert found.verdict is Verdict.NO_SPREAD
        assert (found.interval, found.p, found.decidable) == (None, None, None)
        assert found.mean == pytest.approx(values[0] - baseline[0])
    summary = summarize(values)
    assert (summary.deviation, summary.interval) == (0, None)
    assert of_numbers([0.3, 0.3, 0.3]) is None  # as no items that all agree do
    one_varies = compare(values, [2.0, 2.1, 2.2])
    assert one_varies.verdict is Verdict.LOWER


def test_trials_that_all_end_alike_still_tell_what_their_number_can():
    """Thirty keys of which one arm finds all and the other none, and two that both find none."""
    # One hit and one miss more: shares 31/32 and 1/32, each of variance 31/32² / 32.
    error = alike_trials(30)
    assert error == Component(variance=pytest.approx(2 * 31 / 32**3), degrees=29)
    half = scipy.stats.t.ppf(0.975, 29) * (2 * 31 / 32**3) ** 0.5
    for share, verdict in ((1.0, Verdict.HIGHER), (0.0, Verdict.UNDECIDED)):
        found = compare([share] * 3, [0.0] * 3, lambda _: [error])
        assert found.verdict is verdict
        assert found.decidable == pytest.approx(half)


def test_a_difference_is_tested_against_a_margin():
    variant, baseline = [1.0, 2.0, 3.0], [4.0, 6.0, 8.0]
    shifted = compare([one + 1.5 for one in variant], baseline)
    found = compare(variant, baseline, against=-1.5)
    assert found.p == pytest.approx(shifted.p)
    for margin, verdict in ((-9, Verdict.HIGHER), (-1, Verdict.UNDECIDED), (0.5, Verdict.LOWER)):
        found = compare(variant, baseline, against=margin)
        assert found.verdict is verdict
        assert found.interval == shifted.interval or found.mean == -4


def test_a_comparison_that_is_shown_twice_counts_once():
    def one(p: float, compared: str, against: float = 0.0) -> Difference:
        return Difference(mean=1.0, interval=(0, 2), p=p, compared=compared, against=against)

    again = [one(0.04, "a"), replace(one(0.04, "a"), mean=100.0)]  # in per cent
    assert family(again) == {(0.0, "a"): 0.04}
    assert account(*again).startswith("Comparisons on this page: 1. Decided one by one: 1;")
    # The same p of other numbers, and of the same numbers against another bound, counts.
    assert len(family([*again, one(0.04, "b"), one(0.04, "a", against=0.5)])) == 3
    # Once .03 counts twice, its limit is no longer 1/2 but 2/3 of 5 %.
    alone = [one(0.03, "a"), one(0.6, "b")]
    assert threshold_of([*alone, one(0.03, "a")]) == threshold_of(alone) < 0.03
    unknown = replace(alone[0], p=None)
    assert threshold_of([one(0.03, "a"), unknown]) == 0.03  # what has no p-value is no test


def test_the_error_of_drawn_items_widens_the_interval():
    variant, baseline = [0.9, 0.8, 1.0], [0.1, 0.2, 0.0]
    alone = compare(variant, baseline)
    # Ten questions whose difference is 1, 0 or in between: variance 0.1 of their mean.
    few = compare(variant, baseline, lambda _: [Component(variance=0.1, degrees=9)])
    assert alone.verdict is Verdict.HIGHER
    assert few.mean == alone.mean
    # Variances .01/3, .01/3 and .1; degrees .10667² / (2 (.00333²/2) + .1²/9) = 10.14.
    half = scipy.stats.t.ppf(0.975, 0.1066667**2 / (0.0033333**2 + 0.1**2 / 9)) * 0.1066667**0.5
    assert few.decidable == pytest.approx(half, rel=1e-5)
    assert component([1.0, 2.0, 6.0]) == Component(variance=7 / 3, degrees=2)


@pytest.mark.parametrize("variance", [1e-6, 1e-3, 0.01, 0.1, 1.0])
def test_the_error_of_drawn_items_never_makes_a_difference_surer(variance):
    """Many items have many degrees of freedom: joined with those of two or three seeds, they could
    narrow the interval that the seeds alone give."""
    items = [Component(variance=variance, degrees=1000)]
    for variant, baseline in (([0.9, 0.8, 1.0], [0.5, 0.1, 0.0]), ([3.0, 2.9], [2.0, 2.2])):
        for alone, both in (
            (compare(variant, baseline), compare(variant, baseline, lambda _: items)),
            (
                compare(variant, [7.0, 7.1], relative=True),
                compare(variant, [7.0, 7.1], lambda _: items, relative=True),
            ),
        ):
            assert both.p >= alone.p
            (low, high), (wider_low, wider_high) = alone.interval, both.interval
            assert wider_low - 1e-12 <= low < high <= wider_high + 1e-12
            # An interval without zero, and only one, has a p-value of at most 5 %.
            assert (both.p <= 0.05) == (both.interval[0] > 0 or both.interval[1] < 0)


def test_benjamini_hochberg_is_scipys_and_a_p_value_at_its_limit_holds():
    """However the limit is rounded: 0.05 * 43 / 43 is below 0.05 in floats."""

    # Limits at 5 %: .01, .02, .03, .04, .05. The third is the last below its own; the second, above
    # its own, survives with it.
    def threshold_of_p(*p_values: float) -> float:
        one = Difference(mean=1.0, interval=(0, 2), p=None)
        return threshold_of(replace(one, p=p, compared=str(n)) for n, p in enumerate(p_values))

    p_values = [0.9, 0.021, 0.005, 0.03, 0.2]
    threshold = threshold_of_p(*p_values)
    assert threshold == 0.03
    adjusted = scipy.stats.false_discovery_control(p_values)
    assert [p <= threshold for p in p_values] == [p <= 0.05 for p in adjusted]
    assert threshold_of_p(0.04, 0.6) < 0.04
    assert threshold_of([]) < 0
    for n in range(1, 100):
        assert threshold_of_p(*[0.05] * n) == 0.05
        limits = [float(Fraction("0.05") * rank / n) for rank in range(1, n + 1)]
        assert threshold_of_p(*limits[:-1], 0.9) == (limits[-2] if n > 1 else -1)
    alone = Difference(mean=1.0, interval=(0.0, 2.0), p=0.05)
    assert "Decided one by one: 1; together" in account(alone)


def test_a_ratio_is_fiellers():
    """Against a baseline without spread, the t-interval of the mean; its p-value is Welch's."""
    variant, baseline = [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]
    found = compare(variant, baseline, relative=True)
    assert found.mean == -0.5
    half = scipy.stats.t.ppf(0.975, 2) / 3**0.5 / 4
    assert found.interval == pytest.approx((-0.5 - half, -0.5 + half))
    baseline = [4.0, 6.0, 8.0]
    for against in (0.0, -0.5, 0.2):
        found = compare(variant, baseline, against=against, relative=True)
        scaled = [(1 + against) * one for one in baseline]
        expected = scipy.stats.ttest_ind(variant, scaled, equal_var=False).pvalue
        assert found.p == pytest.approx(expected)
    one_seed = compare([1.0], baseline, relative=True)
    assert (one_seed.mean, one_seed.verdict) == (pytest.approx(1 / 6 - 1), Verdict.ONE_SEED)
    alike = compare([2.0, 2.0], [4.0, 4.0], relative=True)
    assert alike.verdict is Verdict.NO_SPREAD
