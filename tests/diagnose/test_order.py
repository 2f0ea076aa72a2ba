"""The initial angles and the anomaly, against the models' own rotation."""

import pytest
import tests_architectures as architectures
import torch
from torch import nn

from clearhead.diagnose.order import PAIRS, RotaryOrder, rotary_of, scores
from clearhead.models import with_rope_scaling
from clearhead.ops.visibility import Visibility
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe

from .conftest import LONGEST, ROTARY, UNTURNED, VOCABULARY, make

T = 33


def _observed(name: str) -> RotaryOrder:
    model = make(name)
    profile = RotaryOrder(model)
    with torch.no_grad(), observe(model, attention=[profile]):
        model(input_ids=torch.randint(2, VOCABULARY, (2, T)))
    return profile


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
BEYOND = {  # texts of twice the trained length, whose base is another
    "Llama, dynamic": lambda: architectures.make(
        "Llama", num_hidden_layers=3, max_position_embeddings=LONGEST, rope_parameters=DYNAMIC
    ),
    "transformer, dynamic": lambda: with_rope_scaling(make("transformer"), "dynamic", factor=4),
}


@pytest.mark.parametrize("name", [*(n for n in ROTARY if n != "coca"), *BEYOND])
def test_the_rotation_found_is_the_models_own(tiny, name):
    """Undone by the frequencies found, scores depend on content and distance alone: a text of one
    token has the same q and k at every position, so its products h must be equal everywhere, and
    its scores by distance are those that the model computes."""
    model = BEYOND[name]() if name in BEYOND else make(name)
    length = 2 * LONGEST if name in BEYOND else T
    seen: list[AttentionCall] = tiny.Calls()
    with torch.no_grad(), observe(model, attention=[seen]):
        model(input_ids=torch.full((1, length), 7))
    profile = RotaryOrder(model)
    for call in seen if name in BEYOND else seen[:1]:  # a null key tells positions apart
        rotary = rotary_of(model, call.module, call.layer, call.k.shape[2])
        assert isinstance(rotary, torch.Tensor)
        h = profile._products(call, rotary)
        assert h.shape[2] == PAIRS
        spread = (h - h[:, :, :1]).abs().amax() / h.abs().amax()
        assert spread < 1e-4
        assert len(rotary) * 2 <= call.q.shape[-1]
        if name in BEYOND:
            distances = torch.arange(call.k.shape[2])
            found = call.scale * scores(h[0, :, 0], rotary, distances)
            k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
            own = (call.q[0, :, -1:] @ k[0].mT * call.scale)[:, 0].flip(-1)
            assert torch.allclose(found, own, atol=1e-4 * own.abs().amax())


@pytest.mark.parametrize("hidden", ["bool", "added", "by clearhead"])
def test_pairs_are_of_keys_that_the_query_sees(hidden):
    """Unturned, with q_i = (i, 1) and k_j = (1, j) in two pairs: h names the query and the key."""
    window, place = 5, torch.arange(T).float()
    one, none = torch.ones(T), torch.zeros(T)
    q = torch.stack([place, one, none, none], -1)[None, None]
    k = torch.stack([one, place, none, none], -1)[None, None]
    distance = place[:, None] - place
    mask = ((distance >= 0) & (distance < window))[None, None]
    options = {"visibility": Visibility(window=window)}
    if hidden != "by clearhead":
        added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        options = {"visibility": Visibility(causal=False)}
        options["mask"] = mask if hidden == "bool" else added
    rotary = torch.zeros(2).double()
    call = AttentionCall(module=nn.Identity(), layer=0, q=q, k=k, scale=1.0, **options)
    h = RotaryOrder(None)._products(call, rotary)
    apart = h[0, 0, :, 0].real - h[0, 0, :, 1].real
    assert apart.unique().tolist() == list(range(window))


@pytest.mark.parametrize("name", UNTURNED)
def test_what_is_not_turned_is_said(name):
    profile = _observed(name)
    assert profile.why_not()
    assert profile.measures() == []


def _values(name: str) -> dict[str, float]:
    lines = _observed(name).measures()
    return {line["metric"]: line["value"] for line in lines if "layer" not in line}


def test_random_angles_are_anomalous_by_half_and_collinear_ones_never():
    """In a bidirectional model each pair is anomalous on one side."""
    values = _values("Llama")
    assert values["anomalous_before"] == pytest.approx(0.5, abs=0.1)
    assert "anomalous_after" not in values
    values = _values("coca")
    assert values["anomalous_before"] == values["anomalous_weight_before"] == 0
    values = _values(architectures.OUR_ENCODER)
    both = values["anomalous_before"] + values["anomalous_after"]
    assert both == pytest.approx(1, abs=5e-3)  # but for angles of 0 and π within rounding


def test_by_hand():
    """One pair: q and k at distance 0 with k a quarter turn ahead, so Θ = −π/2: anomalous."""
    rotary = torch.tensor([0.1]).double()
    profile = RotaryOrder(None)
    h = torch.polar(torch.ones(5, 1), torch.full((5, 1), -torch.pi / 2))
    profile._add(0, h[None, None], rotary, torch.float32, ("before", "after"))
    found = {x["metric"]: x["value"] for x in profile.measures() if "layer" not in x}
    assert found["anomalous_before"] == 1
    assert found["anomalous_after"] == 0
    # sin(0.1 s) rises up to s = 15: nearer is lower, for every pair.
    assert found["order_broken_content"] == 1
