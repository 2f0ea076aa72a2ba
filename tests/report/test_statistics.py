"""Mean, spread, intervals and verdicts against numbers worked out by hand, and by scipy."""

import pytest
import scipy.stats

from clearhead.report.statistics import (
    Component,
    Verdict,
    compare,
    component,
    false_discovery_threshold,
    summarize,
    t_quantile,
    t_tails,
)


def test_summary_of_three_seeds() -> None:
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.n, summary.mean) == (3, 3.0)
    # Deviations -2, -1, 3: squares sum to 14, over n - 1 = 2 is 7.
    assert summary.deviation == pytest.approx(7**0.5)
    half = 4.30265 * 7**0.5 / 3**0.5
    assert summary.interval == pytest.approx((3 - half, 3 + half), rel=1e-5)


def test_one_seed_has_no_spread_and_none_no_summary() -> None:
    summary = summarize([5.0])
    assert summary is not None
    assert (summary.n, summary.mean, summary.deviation, summary.interval) == (1, 5.0, None, None)
    assert summarize([]) is None


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 2.5, 4, 30, 120, 1e5])
def test_quantiles_and_tails_of_t_are_scipys(degrees: float) -> None:
    assert t_quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), abs=1e-8)
    for t in (0.0, 0.3, -1.0, 2.0, 12.0, 80.0):
        expected = 2 * scipy.stats.t.sf(abs(t), degrees)
        assert t_tails(t, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_a_difference_is_welchs() -> None:
    # Means 2 and 6; variances 1 and 4 over 3 seeds each: error² 1/3 + 4/3 = 5/3,
    # degrees (5/3)² / ((1/3)²/2 + (4/3)²/2) = 50/17.
    found = compare([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert found is not None
    assert found.mean == -4.0
    half = scipy.stats.t.ppf(0.975, 50 / 17) * (5 / 3) ** 0.5
    assert found.interval == pytest.approx((-4 - half, -4 + half))
    assert found.decidable == pytest.approx(half)
    assert half == pytest.approx(4.155, abs=1e-3)
    assert found.verdict is Verdict.UNDECIDED
    expected = scipy.stats.ttest_ind([1, 2, 3], [4, 6, 8], equal_var=False).pvalue
    assert found.p == pytest.approx(expected)


def test_a_difference_needs_an_interval_that_excludes_zero() -> None:
    baseline = [10.0, 10.2, 10.1]
    for shift, verdict in ((1, Verdict.HIGHER), (-1, Verdict.LOWER), (0.1, Verdict.UNDECIDED)):
        found = compare([value + shift for value in baseline], baseline)
        assert found is not None
        assert found.verdict is verdict


def test_seeds_are_not_paired() -> None:
    """What changes together in both arms is no evidence: only the order of data is shared."""
    found = compare([1.1, 5.1, 9.1], [1.0, 5.0, 9.0])
    assert found is not None
    assert found.verdict is Verdict.UNDECIDED
    assert compare([9.1, 1.1, 5.1], [1.0, 5.0, 9.0]) == found


def test_a_single_seed_of_either_arm_decides_nothing() -> None:
    for variant, baseline in (([1.0], [100.0]), ([1.0], [100.0, 100.0]), ([1.0, 1.0], [100.0])):
        found = compare(variant, baseline)
        assert found is not None
        assert found.verdict is Verdict.ONE_SEED
        assert found.p is None
    assert compare([], [1.0, 2.0]) is None


def test_numbers_without_spread_differ_or_are_equal() -> None:
    different, equal = compare([2.0, 2.0], [1.0, 1.0]), compare([1.0, 1.0], [1.0, 1.0])
    assert different is not None
    assert equal is not None
    assert (different.verdict, different.p) == (Verdict.HIGHER, 0)
    assert (equal.verdict, equal.p) == (Verdict.UNDECIDED, 1)


def test_the_error_of_drawn_items_widens_the_interval() -> None:
    variant, baseline = [0.9, 0.8, 1.0], [0.1, 0.2, 0.0]
    alone = compare(variant, baseline)
    # Ten questions whose difference is 1, 0 or in between: variance 0.1 of their mean.
    few = compare(variant, baseline, [Component(variance=0.1, degrees=9)])
    assert alone is not None
    assert few is not None
    assert alone.verdict is Verdict.HIGHER
    assert few.mean == alone.mean
    # Variances .01/3, .01/3 and .1; degrees .10667² / (2 (.00333²/2) + .1²/9) = 10.14.
    half = scipy.stats.t.ppf(0.975, 0.1066667**2 / (0.0033333**2 + 0.1**2 / 9)) * 0.1066667**0.5
    assert few.decidable == pytest.approx(half, rel=1e-5)
    assert component([1.0, 2.0, 6.0]) == Component(variance=7 / 3, degrees=2)


def test_benjamini_hochberg_by_hand() -> None:
    # Limits at 5 %: .01, .02, .03, .04, .05. The third is the last below its own; the second, above
    # its own, survives with it.
    p_values = [0.9, 0.021, 0.005, 0.03, 0.2]
    threshold = false_discovery_threshold(p_values)
    assert threshold == 0.03
    adjusted = scipy.stats.false_discovery_control(p_values)
    assert [p <= threshold for p in p_values] == [p <= 0.05 for p in adjusted]
    assert false_discovery_threshold([0.04, 0.6]) < 0.04
    assert false_discovery_threshold([]) < 0
