"""The initial angles, the anomaly and the decay bound, against the models' own rotation."""

import pytest
import torch

from clearhead.diagnose.order import PAIRS, RotaryOrder, decay_bound
from clearhead.diagnose.rotary import Rotary, rotary_of
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe

from .kinds import ENCODERS, ROTARY, UNTURNED, VOCABULARY, make

T = 33


def _observed(name: str) -> RotaryOrder:
    model = make(name)
    profile = RotaryOrder(model, T)
    with torch.no_grad(), observe(model, attention=[profile]):
        model(input_ids=torch.randint(2, VOCABULARY, (2, T)))
    return profile


@pytest.mark.parametrize("name", [n for n in ROTARY if n != "coca"])
def test_the_rotation_found_is_the_models_own(tiny, name):
    """Undone by the frequencies found, scores depend on content and distance alone: a text of one
    token has the same q and k at every position, so its products h must be equal everywhere."""
    model = make(name)
    seen: list[AttentionCall] = tiny.Calls()
    with torch.no_grad(), observe(model, attention=[seen]):
        model(input_ids=torch.full((1, T), 7))
    profile = RotaryOrder(model, T)
    call = seen[0]
    rotary = rotary_of(model, call.module, 0, call.q.shape[-1])
    assert isinstance(rotary, Rotary)
    h, _ = profile._products(call, rotary)
    assert h.shape[2] == PAIRS
    spread = (h - h[:, :, :1]).abs().amax() / h.abs().amax()
    assert spread < 1e-4
    assert len(rotary.frequency) * 2 <= call.q.shape[-1]


@pytest.mark.parametrize("name", UNTURNED)
def test_what_is_not_turned_is_said(name):
    profile = _observed(name)
    assert profile.why_not()
    assert profile.measures() == []
    assert profile.curves() == []


def test_random_angles_are_anomalous_by_half_and_collinear_ones_never():
    values = {
        line["metric"]: line["value"]
        for line in _observed("Llama").measures()
        if "layer" not in line
    }
    assert values["anomalous_before"] == pytest.approx(0.5, abs=0.1)
    assert "anomalous_after" not in values
    values = {
        line["metric"]: line["value"]
        for line in _observed("coca").measures()
        if "layer" not in line
    }
    assert values["anomalous_before"] == values["anomalous_weight_before"] == 0


def test_in_a_bidirectional_model_each_pair_is_anomalous_on_one_side():
    for name in ENCODERS[:2]:
        values = {
            line["metric"]: line["value"]
            for line in _observed(name).measures()
            if "layer" not in line
        }
        both = values["anomalous_before"] + values["anomalous_after"]
        assert both == pytest.approx(1, abs=5e-3)  # but for angles of 0 and π within rounding


def test_by_hand():
    """One pair: q and k at distance 0 with k a quarter turn ahead, so Θ = −π/2: anomalous."""
    turn = torch.tensor(0.1)
    rotary = Rotary(
        frequency=turn[None].double(), first=torch.tensor([0]), second=torch.tensor([1])
    )
    profile = RotaryOrder(None, 8)
    h = torch.polar(torch.ones(5, 1), torch.full((5, 1), -torch.pi / 2))
    found = profile._of(h[None, None], rotary, torch.float32, 2.0)
    assert found["anomalous_before"] == found["counted"] == 5
    assert found["anomalous_after"] == 0
    # sin(0.1 s) rises up to s = 15: nearer is lower, for every pair.
    assert found["broken"] == found["pairs"] == 5
    expected = 2 * 5 * torch.sin(0.1 * profile.distances.double()).abs()
    assert torch.allclose(found["decay"], expected, atol=1e-5)


@pytest.mark.parametrize("collinear", [False, True])
def test_no_score_exceeds_its_bound(collinear):
    pairs = 16
    frequency = 10_000.0 ** -(torch.arange(pairs).double() / pairs)
    place = torch.arange(pairs)
    rotary = Rotary(frequency=frequency, first=place, second=place, collinear=collinear)
    size = torch.rand(500, pairs)
    angle = torch.zeros(500, pairs) if collinear else torch.rand(500, pairs) * 6.3
    h = torch.polar(size, angle)
    distances = torch.tensor([0, 1, 5, 64, 512, 4096])
    score = RotaryOrder._scores(h, rotary, distances).abs()
    bound = decay_bound(h, rotary, distances)
    assert (score <= bound * (1 + 1e-5)).all()
    assert (score > bound * 0.05).any()  # not an empty one
