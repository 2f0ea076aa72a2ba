"""Mean, spread, intervals and verdicts against numbers worked out by hand."""

import pytest

from clearhead.report.statistics import Verdict, compare, summarize, t_quantile


def test_summary_of_three_seeds() -> None:
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.n, summary.mean) == (3, 3.0)
    # Deviations -2, -1, 3: squares sum to 14, over n - 1 = 2 is 7.
    assert summary.deviation == pytest.approx(7**0.5)
    half = 4.303 * 7**0.5 / 3**0.5
    assert summary.interval == pytest.approx((3 - half, 3 + half))


def test_one_seed_has_no_spread_and_none_no_summary() -> None:
    summary = summarize([5.0])
    assert summary is not None
    assert (summary.n, summary.mean, summary.deviation, summary.interval) == (1, 5.0, None, None)
    assert summarize([]) is None


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (30, 2.042), (40, 2.0211), (120, 1.9799)]
)
def test_t_quantiles(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=2e-4)


def test_a_difference_needs_an_interval_that_excludes_zero() -> None:
    baseline = {0: 10.0, 1: 12.0, 2: 11.0}
    clear = compare({0: 9.0, 1: 11.1, 2: 9.9}, baseline)  # differences -1, -0.9, -1.1
    assert clear.verdict is Verdict.LOWER
    assert clear.summary is not None
    assert clear.summary.mean == pytest.approx(-1.0)
    noisy = compare({0: 9.0, 1: 12.5, 2: 10.2}, baseline)  # differences -1, 0.5, -0.8
    assert noisy.verdict is Verdict.UNDECIDED
    assert compare({0: 11.0, 1: 13.1, 2: 11.9}, baseline).verdict is Verdict.HIGHER


def test_one_shared_seed_decides_nothing() -> None:
    assert compare({0: 1.0}, {0: 100.0}).verdict is Verdict.ONE_SEED
    assert compare({0: 1.0, 1: 1.0}, {1: 100.0, 2: 100.0}).verdict is Verdict.ONE_SEED
    assert compare({0: 1.0}, {1: 100.0}).verdict is Verdict.ONE_SEED


def test_equal_seeds_are_undecided() -> None:
    assert compare({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).verdict is Verdict.UNDECIDED
