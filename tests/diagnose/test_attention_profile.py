"""Statistics of attention: by hand, and in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clearhead.diagnose.attention_profile import LogitSizes, RowMeans
from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility
from clearhead.probe import AttentionCall, ByTile
from clearhead.probe import tiles as module_under_test

B, H, G, T, D = 2, 4, 2, 37, 6


def _profile() -> ByTile:
    return ByTile(weights=[RowMeans()], scores=[LogitSizes()])


def _call(**changes: object) -> AttentionCall:
    q, k = torch.randn(B, H, T, D) * 2, torch.randn(B, G, T, D) * 2
    given = {"module": nn.Identity(), "layer": 3, "q": q, "k": k, "scale": 0.6}
    seen = {name: changes.pop(name) for name in ("causal", "key_mask") if name in changes}
    return AttentionCall(**{**given, **changes}, visibility=Visibility(**seen))


def _observed(call: AttentionCall) -> ByTile:
    profile = _profile()
    profile.observe(call)
    return profile


def _oracle(call: AttentionCall) -> SimpleNamespace:
    """Every statistic in float64, over the queries that see a key."""
    q, k = call.q.double(), call.k.double().repeat_interleave(H // G, 1)
    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = call.visibility.key_mask
    seen = oracles.visible(T, T, causal=call.causal, key_mask=mask).expand(scores.shape)
    shown = scores.masked_fill(~seen, -torch.inf)
    total = shown.exp().sum(-1)
    if call.sink is not None:
        total = total + torch.as_tensor(call.sink).double().expand(H)[:, None].exp()
    weights = shown.exp() / total[..., None]
    largest = (scores == shown.amax(-1, keepdim=True)) & seen
    null = (1 - weights.sum(-1)).clamp_min(0)
    values = {
        "argmax": largest[..., 0] / largest.sum(-1),
        "mass": weights[..., 0],
        "entropy": torch.special.entr(weights).sum(-1) + torch.special.entr(null),
        "null": null,
        "floor": seen[..., 0] / seen.sum(-1),
    }
    return SimpleNamespace(
        **{name: one[seen.any(-1)].mean().item() for name, one in values.items()},
        logits=scores[seen].abs().sort(descending=True).values.tolist(),
    )


VARIANTS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "softmax-1": {"sink": 0.0},
    "sinks": {"sink": torch.tensor([-1.0, 0.5, 3.0, -80.0])},
    "padded": {"key_mask": (torch.arange(T) < torch.tensor([[T], [20]]))},
    "left-padded": {"key_mask": (torch.arange(T) >= torch.tensor([[0], [7]]))},
    "capped": {"softcap": 1.5},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tile", [1 << 20, 700])
def test_against_float64(tiny, name, tile, monkeypatch):
    monkeypatch.setattr(module_under_test, "TILE", tile)
    call = _call(**VARIANTS[name])
    profile, expected = _observed(call), _oracle(call)
    lines = profile.measures()
    for metric, wanted in (
        ("first_token_argmax_share", expected.argmax),
        ("first_token_mass", expected.mass),
        ("entropy", expected.entropy),
    ):
        found = tiny.value(lines, metric, map="softmax", layer=3)
        assert found == pytest.approx(wanted, rel=2e-5), metric
        assert tiny.value(lines, metric, map="softmax") == found
    assert tiny.value(lines, "chance_floor") == pytest.approx(expected.floor, rel=2e-5)
    metrics = {line["metric"] for line in lines}
    assert ("null_mass" in metrics) == (call.sink is not None)
    if call.sink is not None:
        null = tiny.value(lines, "null_mass", map="softmax")
        assert null == pytest.approx(expected.null, rel=2e-5)
    for rank in (1, 2, 3, 10, 100):
        wanted = expected.logits[rank - 1]
        assert tiny.value(lines, f"logit_top_{rank}") == pytest.approx(wanted, rel=1e-5)
    assert "non_finite_rows" not in metrics


def test_the_median_of_the_logits(tiny):
    """Of one query in 16: the queries 0, 16 and 32, whose logits are known here."""
    q = torch.zeros(1, 1, T, 1)
    q[0, 0, 16], q[0, 0, 32] = 1.0, 3.0
    lines = _observed(_call(q=q, k=torch.ones(1, 1, T, 1), scale=1.0)).measures()
    # 1 zero, 17 ones, 33 threes
    assert tiny.value(lines, "logit_median") == pytest.approx(3.0, rel=3e-3)


def test_equal_rows_are_at_chance(tiny):
    lines = _observed(_call(q=torch.zeros(B, H, T, D))).measures()
    share = tiny.value(lines, "first_token_argmax_share", map="softmax")
    assert share == pytest.approx(tiny.harmonic(T))
    assert tiny.value(lines, "chance_floor") == pytest.approx(tiny.harmonic(T))
    ceiling = tiny.value(lines, "entropy_ceiling")
    assert tiny.value(lines, "entropy", map="softmax") == pytest.approx(ceiling, rel=1e-6)
    assert tiny.value(lines, "logit_top_1") == tiny.value(lines, "logit_median") == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_are_counted_and_left_out(tiny, value):
    call = _call()
    call.q[1, 2, 20] = torch.tensor([value, 0, 0, 0, 0, 0])
    clean = call.q.clone()
    profile = _observed(call)
    assert tiny.value(profile.measures(), "non_finite_rows") == 1
    assert all(math.isfinite(line["value"]) for line in profile.measures())
    assert torch.equal(call.q.nan_to_num(), clean.nan_to_num())
