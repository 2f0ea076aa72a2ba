"""The whole profile of attention against a plain float64 computation of every row by itself."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from clearhead.diagnose import profile as module_under_test
from clearhead.diagnose.profile import AttentionProfile, _by_distance
from clearhead.diagnose.weights import AttentionCall
from clearhead.ops.visibility import Visibility

B, H, G, T, D = 2, 4, 2, 37, 6


def _call(**changes: object) -> AttentionCall:
    q, k = torch.randn(B, H, T, D) * 2, torch.randn(B, G, T, D) * 2
    given = {"module": nn.Identity(), "layer": 3, "q": q, "k": k, "scale": 0.6}
    seen = {name: changes.pop(name) for name in ("causal", "key_mask") if name in changes}
    return AttentionCall(**{**given, **changes}, visibility=Visibility(**seen))


def _oracle(call: AttentionCall) -> SimpleNamespace:
    """Every statistic, query by query, in float64."""
    q, k = call.q.double(), call.k.double().repeat_interleave(H // G, 1)
    sink = None if call.sink is None else torch.as_tensor(call.sink).double().expand(H)
    found = {name: [] for name in ("argmax", "mass", "entropy", "null", "floor", "near")}
    logits, distance = [], torch.zeros(2 * T + 1, dtype=torch.float64)
    masses = torch.zeros(B, H, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                s = (k[b, h] @ q[b, h, i]) * call.scale
                if call.softcap is not None:
                    s = call.softcap * torch.tanh(s / call.softcap)
                seen = torch.ones(T, dtype=torch.bool)
                if call.causal:
                    seen[i + 1 :] = False
                if call.visibility.key_mask is not None:
                    seen &= call.visibility.key_mask[b]
                if not seen.any():
                    continue
                e = torch.where(seen, s.exp(), 0.0)
                z = e.sum() + (0 if sink is None else sink[h].exp())
                p = e / z
                top = s[seen].max()
                ties = int(((s == top) & seen).sum())
                found["argmax"].append(float(seen[0] and s[0] == top) / ties)
                found["mass"].append(float(p[0]))
                rest = [float(1 - p.sum())] if sink is not None else []
                parts = [float(x) for x in p if x > 0] + [x for x in rest if x > 0]
                found["entropy"].append(-sum(x * math.log(x) for x in parts))
                found["null"] += rest
                found["floor"].append(float(seen[0]) / int(seen.sum()))
                logits += s[seen].abs().tolist()
                masses[b, h] += p[0] / T
                for j in range(T):
                    distance[i - j + T] += p[j]
                if i >= 15 and seen[i - 15 : i + 1].all():
                    found["near"].append(float(s[i - 3 : i + 1].mean() < s[i - 15 : i - 3].mean()))
    return SimpleNamespace(
        **{name: torch.tensor(values).mean().item() for name, values in found.items()},
        logits=sorted(logits, reverse=True),
        distance=distance,
        masses=masses,
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
def test_against_float64(name, tile, monkeypatch):
    monkeypatch.setattr(module_under_test, "TILE", tile)
    call = _call(**VARIANTS[name])
    profile = AttentionProfile()
    profile.observe(call)
    expected = _oracle(call)
    for metric, wanted in (
        ("first_token_argmax_share", expected.argmax),
        ("first_token_mass", expected.mass),
        ("entropy", expected.entropy),
        ("chance_floor", expected.floor),
    ):
        assert profile.value(metric, "softmax", 3) == pytest.approx(wanted, rel=2e-5), metric
    if call.sink is None:
        assert profile.value("null_mass", "softmax") is None
    else:
        assert profile.value("null_mass", "softmax") == pytest.approx(expected.null, rel=2e-5)
    found = profile.reach[3, "softmax"].sum(0)
    assert torch.allclose(found, expected.distance, atol=1e-4)
    lines = {
        (line["metric"], line.get("layer")): line["value"]
        for line in profile.measures()
        if line.get("map", "softmax") == "softmax" and "head" not in line
    }
    for rank in (1, 2, 3, 10, 100):
        wanted = expected.logits[rank - 1]
        assert lines[f"logit_top_{rank}", None] == pytest.approx(wanted, rel=1e-5)
    sinks = (expected.masses > 0.3).double().mean().item()
    assert lines["sink_rate_0.3", None] == pytest.approx(sinks)
    assert lines["order_broken_before", None] == pytest.approx(expected.near)
    assert ("order_broken_after", None) in lines or call.causal
    assert "non_finite_rows" not in dict(lines)


def test_the_median_of_the_logits():
    """Of one query in 16: the queries 0, 16 and 32, whose logits are known here."""
    q = torch.zeros(1, 1, T, 1)
    q[0, 0, 16], q[0, 0, 32] = 1.0, 3.0
    profile = AttentionProfile()
    profile.observe(_call(q=q, k=torch.ones(1, 1, T, 1), scale=1.0))
    median = {line["metric"]: line["value"] for line in profile.measures()}["logit_median"]
    assert median == pytest.approx(3.0, rel=3e-3)  # 1 zero, 17 ones, 33 threes


def test_equal_rows_are_at_chance():
    profile = AttentionProfile()
    profile.observe(_call(q=torch.zeros(B, H, T, D)))
    harmonic = sum(1 / (i + 1) for i in range(T)) / T
    assert profile.value("first_token_argmax_share", "softmax") == pytest.approx(harmonic)
    assert profile.value("chance_floor", "softmax") == pytest.approx(harmonic)
    ceiling = profile.value("entropy_ceiling", "softmax")
    assert profile.value("entropy", "softmax") == pytest.approx(ceiling, rel=1e-6)
    lines = {line["metric"]: line["value"] for line in profile.measures()}
    assert lines["order_broken_before"] == 0
    assert lines["logit_top_1"] == lines["logit_median"] == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_are_counted_and_left_out(value):
    call = _call()
    call.q[1, 2, 20] = torch.tensor([value, 0, 0, 0, 0, 0])
    clean = call.q.clone()
    profile = AttentionProfile()
    profile.observe(call)
    lines = {line["metric"]: line["value"] for line in profile.measures() if "layer" not in line}
    assert lines["non_finite_rows"] == 1
    numbers = [line["value"] for line in profile.measures()]
    assert all(math.isfinite(number) for number in numbers)
    assert math.isfinite(sum(profile.curves()[0]["y"]))
    assert torch.equal(call.q.nan_to_num(), clean.nan_to_num())


def test_texts_of_several_lengths_and_the_bands():
    profile = AttentionProfile()
    for length in (5, 9):
        q = torch.zeros(1, 1, length, 2)
        profile.observe(_call(q=q, k=torch.randn(1, 1, length, 2)))
    (whole, _) = profile.curves()[:2]
    assert whole["x"] == ["0", "1", "2–3", "4–7", "8–15"]
    assert sum(whole["y"]) == pytest.approx(1)
    # Uniform rows: the weight at distance 0 is 1/(i + 1).
    zero = sum(1 / (i + 1) for i in range(5)) + sum(1 / (i + 1) for i in range(9))
    assert whole["y"][0] == pytest.approx(zero / 14)


def test_sums_along_diagonals():
    weights = torch.randn(2, 3, 5)
    expected = torch.zeros(2, 7)
    for r in range(3):
        for c in range(5):
            expected[:, 2 - r + c] += weights[:, r, c]
    assert torch.allclose(_by_distance(weights), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["differential", "differential-v2"])
def test_the_signed_difference(tiny, name):
    from clearhead.diagnose.interface import probing

    model, ids = tiny.ours(name), torch.stack(tiny.windows(2, 13))
    profile = AttentionProfile()
    with torch.no_grad(), probing(model, profile.observe):
        model(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps: tuple[Tensor, ...] = model(ids, output_attentions=True).attentions
    for layer, signed in enumerate(maps):
        mass = signed[..., 0].mean().item()
        assert profile.value("first_token_mass", "difference", layer) == pytest.approx(mass, 1e-4)
        shown = signed.masked_fill(~torch.ones(13, 13).tril().bool(), -torch.inf)
        share = (shown.argmax(-1) == 0).double().mean().item()
        found = profile.value("first_token_argmax_share", "difference", layer)
        assert found == pytest.approx(share)
        negative, whole = profile.signed[layer].tolist()
        assert negative == pytest.approx(-signed.clamp_max(0).double().sum().item(), rel=1e-4)
        assert whole == pytest.approx(signed.double().abs().sum().item(), rel=1e-4)
    lambdas = [line for line in profile.measures() if line["metric"] == "lambda"]
    assert [line["layer"] for line in lambdas] == [0, 1, 2]
