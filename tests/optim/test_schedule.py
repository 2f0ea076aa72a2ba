from itertools import pairwise

import pytest

from clearhead.optim import SCHEDULES, learning_rate
from clearhead.train import TrainConfig


def make_config(steps, **overrides):
    settings = {"sequence_length": 2, "batch_size": 1, "learning_rate": 1.0, "warmup": 0.2}
    return TrainConfig(tokens=2 * steps, **{**settings, **overrides})


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "triangle"])
def test_it_warms_up_to_the_peak_and_never_rises_again(schedule):
    config = make_config(50, schedule=schedule)
    rates = [learning_rate(step, config) for step in range(config.steps)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("schedule", "half", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)]
)
def test_half_way_through_the_decay_and_in_the_last_step(schedule, half, last):
    config = make_config(50, schedule=schedule)
    assert [learning_rate(step, config) for step in (29, 49)] == pytest.approx([half, last])


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_no_warmup_and_nothing_but_warmup(warmup):
    config = make_config(4, warmup=warmup, schedule="linear", final_learning_rate=0.0)
    expected = [0.25, 0.5, 0.75, 1.0] if warmup else [0.75, 0.5, 0.25, 0.0]
    assert [learning_rate(step, config) for step in range(4)] == pytest.approx(expected)
    assert learning_rate(0, make_config(1, final_learning_rate=0.5)) == 0.5


def test_the_triangle_is_the_crammed_one():
    """triangle2: min(1/4 + x, 4 − 4x) of the share x of the budget that is used."""
    config = make_config(40, schedule="triangle", warmup=0.75, final_learning_rate=0.0)
    shares = [step / 40 for step in range(40)]
    expected = [min(0.25 + x, 4 - 4 * x) for x in shares]
    assert [learning_rate(step, config) for step in range(40)] == pytest.approx(expected)
    for warmup in (0.0, 1.0):
        assert learning_rate(0, make_config(4, schedule="triangle", warmup=warmup)) in (0.25, 1.0)
    # Steps beyond the plan have the rate of its end, which is the peak if all of it is warmup.
    plan = {"schedule": "triangle", "schedule_tokens": 2 * 4, "final_learning_rate": 0.1}
    for warmup, end in ((0.75, 0.1), (1.0, 1.0)):
        assert learning_rate(6, make_config(8, warmup=warmup, **plan)) == pytest.approx(end)


def test_a_triangle_over_a_ramp_is_straight_in_tokens():
    options = {"accumulation": 6, "ramp": 0.5, "schedule": "triangle", "warmup": 0.75}
    config = make_config(60, **options, final_learning_rate=0.0)
    rates = [learning_rate(step, config) for step in range(config.steps)]
    whole = config.tokens_before(config.steps)
    used = [config.tokens_before(step) / whole for step in range(len(rates))]
    assert rates == pytest.approx([min(0.25 + x, 4 - 4 * x) for x in used])
