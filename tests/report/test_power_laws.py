"""Power laws fitted to losses whose law is known."""

import numpy as np
import pytest

from clearhead.report.power_laws import fit

E, SCALES, EXPONENTS, UNIT = 1.7, (2.0, 1.85), (0.16, 0.17), 1e13
COSTS = [UNIT * 6**size for size in range(4)]
FAR = 10 * COSTS[-1]


def _losses(arm: int, noise: float = 0.0, seeds: int = 3, random=None, clock: float = 0.0):
    random = np.random.default_rng(0) if random is None else random
    return [
        (
            cost * np.exp(clock * random.standard_normal(seeds)) if clock else np.full(seeds, cost),
            (E + SCALES[arm] * (cost / UNIT) ** -EXPONENTS[arm])
            * np.exp(noise * random.standard_normal(seeds)),
        )
        for cost in COSTS
    ]


def _true_speedup(cost: float) -> float:
    reducible = SCALES[1] * (cost / UNIT) ** -EXPONENTS[1]
    return (SCALES[0] / reducible) ** (1 / EXPONENTS[0]) * UNIT / cost


def test_exact_laws_are_found_and_one_seed_has_no_interval() -> None:
    laws = fit(_losses(0, seeds=1), _losses(1, seeds=1))
    assert laws.floor == pytest.approx(E, rel=1e-3)
    assert laws.exponents == pytest.approx(EXPONENTS, rel=5e-3)
    for cost in (*COSTS, FAR):
        assert laws.speedup(cost) == pytest.approx(_true_speedup(cost), rel=5e-3)
    assert laws.interval_of_speedup(FAR) is None
    assert laws.interval_of_exponent(False) is None


def test_one_diverging_seed_of_three_moves_the_law_little() -> None:
    baseline, variant = _losses(0, 1e-3), _losses(1, 1e-3)
    variant[1][1][0] *= 1.2
    assert fit(baseline, variant).speedup(FAR) == pytest.approx(_true_speedup(FAR), rel=0.15)


def test_sizes_that_are_no_power_law_widen_the_interval_and_are_told() -> None:
    baseline, variant = _losses(0, 1e-3), _losses(1, 1e-3)
    straight = fit(baseline, variant, draws=200)
    baseline[1] = (baseline[1][0], baseline[1][1] * 1.1)
    bent = fit(baseline, variant, draws=200)
    assert straight.misfit < 0.003
    assert bent.misfit > 0.03
    widths = [
        high - low for low, high in (one.interval_of_speedup(FAR) for one in (straight, bent))
    ]
    assert widths[1] > 3 * widths[0]


@pytest.mark.slow
@pytest.mark.parametrize("clock", [0.0, 0.15], ids=["counted costs", "clocks that differ"])
def test_intervals_cover_the_truth_as_often_as_they_say(clock: float) -> None:
    random = np.random.default_rng(1)
    draws, covered = 60, np.zeros(3)
    for _ in range(draws):
        laws = fit(*(_losses(arm, 0.003, 3, random, clock) for arm in (0, 1)), draws=100)
        intervals = (
            (laws.interval_of_speedup(FAR), _true_speedup(FAR)),
            (laws.interval_of_exponent(False), EXPONENTS[0]),
            (laws.interval_of_exponent(True), EXPONENTS[1]),
        )
        for place, (interval, truth) in enumerate(intervals):
            assert interval is not None
            covered[place] += interval[0] <= truth <= interval[1]
    # Of 60 draws at 95 % each; 0.88 is 2.5 standard errors below.
    assert (covered / draws > 0.88).all(), covered / draws
