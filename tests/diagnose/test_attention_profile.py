"""Statistics of attention, its largest keys and values, and weight on no key: from the formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clearhead.diagnose import diagnose
from clearhead.diagnose.attention_profile import ClosedGates, LogitSizes, NullMass, RowMeans
from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility
from clearhead.probe import AttentionCall, ByTile, observe
from clearhead.probe import tiles as module_under_test
from clearhead.view.observation import AttentionTrace

from .conftest import VOCABULARY, make

SIZES = B, H, G, T, D = 2, 4, 2, 37, 6


def _observed(call: AttentionCall) -> ByTile:
    profile = ByTile(weights=[RowMeans()], scores=[LogitSizes()])
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
    call = tiny.call(*SIZES, layer=3, **VARIANTS[name])
    lines, expected = _observed(call).measures(), _oracle(call)
    for metric, wanted in (
        ("first_token_argmax_share", expected.argmax),
        ("first_token_mass", expected.mass),
        ("entropy", expected.entropy),
        *([("null_mass", expected.null)] if call.sink is not None else []),
    ):
        found = tiny.value(lines, metric, map="softmax", layer=3)
        assert found == pytest.approx(wanted, rel=2e-5), metric
        assert tiny.value(lines, metric, map="softmax") == found
    assert tiny.value(lines, "chance_floor") == pytest.approx(expected.floor, rel=2e-5)
    for rank in (1, 2, 3, 10, 100):
        wanted = expected.logits[rank - 1]
        assert tiny.value(lines, f"logit_top_{rank}") == pytest.approx(wanted, rel=1e-5)
    others = {"non_finite_rows"} | ({"null_mass"} if call.sink is None else set())
    assert not others & {line["metric"] for line in lines}


def test_the_median_of_the_logits(tiny):
    """Of one query in 16: the queries 0, 16 and 32, whose logits are known here."""
    q = torch.zeros(1, 1, T, 1)
    q[0, 0, 16], q[0, 0, 32] = 1.0, 3.0
    lines = _observed(tiny.call(*SIZES, q=q, k=torch.ones(1, 1, T, 1), scale=1.0)).measures()
    # 1 zero, 17 ones, 33 threes
    assert tiny.value(lines, "logit_median") == pytest.approx(3.0, rel=3e-3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_are_counted_and_left_out(tiny, value):
    call = tiny.call(*SIZES)
    call.q[1, 2, 20] = torch.tensor([value, 0, 0, 0, 0, 0])
    clean = call.q.clone()
    profile = _observed(call)
    assert tiny.value(profile.measures(), "non_finite_rows") == 1
    assert all(math.isfinite(line["value"]) for line in profile.measures())
    assert torch.equal(call.q.nan_to_num(), clean.nan_to_num())


def _sizes(model, ids):
    found = diagnose(model, list(ids), batch_size=2).measures
    return [line for line in found if line["metric"] in ("largest_key", "largest_value")]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "softmax1"])
def test_against_a_cache(name):
    model, ids = make(name), torch.randint(2, VOCABULARY, (3, 17))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    lines = {(x["metric"], x["tokens"], x.get("layer")): x for x in _sizes(model, ids)}
    assert len(lines) == 4 * (1 + len(cache.layers))
    whole = lines["largest_key", "rest", None]
    layers = [lines["largest_key", "rest", n] for n in range(len(cache.layers))]
    top = max(layers, key=lambda x: x["value"])
    assert whole["value"] == top["value"]
    assert whole["where"] == f"layer {top['layer']}, {top['where']}"
    for layer, kept in enumerate(cache.layers):
        for metric, x in (("largest_key", kept.keys), ("largest_value", kept.values)):
            for tokens, part, first in (("first", x[:, :, :1], 0), ("rest", x[:, :, 1:], 1)):
                line = lines[metric, tokens, layer]
                assert line["value"] == pytest.approx(part.abs().max().item(), rel=1e-5)
                top = part.abs().amax(0).transpose(0, 1)
                token, head, channel = (top > top.max() * 0.9999).nonzero()[0].tolist()
                assert line["where"] == f"head {head}, channel {channel}, token {token + first}"


def test_a_prefix_is_kept_apart_and_alibis_columns_do_not_count(tiny):
    model = tiny.make("key-value")
    for name, parameter in model.named_parameters():
        if "normalizer" in name:
            torch.nn.init.normal_(parameter, std=50)
    lines = _sizes(model, torch.randint(2, VOCABULARY, (2, 9)))
    values = {(x["metric"], x["tokens"]): x["value"] for x in lines if x.get("layer") == 0}
    parts = ("first", "rest", "prefix")
    assert set(values) == {(f"largest_{kind}", part) for kind in ("key", "value") for part in parts}
    assert values["largest_key", "prefix"] > 3 * values["largest_key", "rest"]
    model = tiny.make("alibi", initializer_range=0.02)
    lines = _sizes(model, torch.randint(2, VOCABULARY, (1, 40)))
    assert max(x["value"] for x in lines if x["metric"] == "largest_key") < 10


BANDS = {0: range(1), **{low: range(low, min(2 * low, T)) for low in (1, 2, 4, 8, 16, 32)}}
SINKS = {
    "softmax-1": torch.zeros(()),
    "a learned logit a head": torch.randn(H),
    "a learned key, which answers to the query": torch.randn(B, H, T),
}


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("tile", [1 << 20, 600])
def test_the_weight_on_the_null_key_by_position(tiny, name, tile, monkeypatch):
    """exp(b) / (exp(b) + Σ exp(s)), mean over the queries of a band, texts and heads."""
    monkeypatch.setattr(module_under_test, "TILE", tile)
    q, k = torch.randn(2, B, H, T, D, dtype=torch.float64)
    sink = SINKS[name].double()
    visibility = Visibility(key_mask=torch.arange(T) >= torch.tensor([[0], [2]]))
    common = {"module": nn.Identity(), "scale": 0.7, "sink": sink, "visibility": visibility}
    statistic = NullMass()
    for layer in (0, 4):
        ByTile(weights=[statistic]).observe(AttentionCall(q=q, k=k, layer=layer, **common))
    logit_BHT = sink[:, None].expand(B, H, T) if sink.ndim == 1 else sink.expand(B, H, T)
    seen = torch.ones(T, T, dtype=torch.bool).tril() & visibility.key_mask[:, None, None]
    keys = torch.where(seen, (0.7 * q @ k.mT).exp(), 0).sum(-1)
    null_BHT = logit_BHT.exp() / (logit_BHT.exp() + keys)
    lines = statistic.measures()
    assert len(lines) == len(BANDS) * (1 + 2)
    for low, queries in BANDS.items():
        some = [null_BHT[0, :, i] for i in queries] + [null_BHT[1, :, i] for i in queries if i >= 2]
        wanted = pytest.approx(float(torch.stack(some).mean()), rel=1e-12)
        place = {"map": "softmax", "position": low}
        assert tiny.value(lines, "null_mass", **place) == wanted, low
        assert tiny.value(lines, "null_mass", layer=4, **place) == wanted, low


def test_learned_keys_with_values_are_no_null_key(tiny):
    """Their weight adds something: it is measured under a name of its own, in a diagnosis and in
    the viewer."""
    model = tiny.make("key-value")
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.normalizer.value_bias)
    (ids,) = tiny.windows(1, 9)
    trace = AttentionTrace(9)
    with torch.no_grad(), observe(model, attention=[ByTile(weights=[trace])]):
        model(ids[None])
    beside = [1 - whole.sum(-1) for whole in trace.maps.values()]
    mean = float(torch.stack(beside).mean())
    assert mean > 0.05
    lines = diagnose(model, [ids], batch_size=1).measures
    assert tiny.value(lines, "prefix_mass", map="softmax") == pytest.approx(mean, abs=1e-3)
    for found in (lines, trace.measures()):
        metrics = {line["metric"] for line in found}
        assert "prefix_mass" in metrics
        assert "null_mass" not in metrics
    plain = diagnose(tiny.make("key-bias"), [ids], batch_size=1).measures
    metrics = {line["metric"] for line in plain}
    assert "null_mass" in metrics
    assert "prefix_mass" not in metrics


def test_a_gate_counts_by_how_far_it_is_closed(tiny):
    model = tiny.make("gated").double()
    ids = torch.stack(tiny.windows(2, T))
    gates, inputs = ClosedGates(), {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.epilogue.register_forward_pre_hook(
            lambda module, arguments, index=index: inputs.update({index: arguments[1]})
        )
    with torch.no_grad(), observe(model, gates=[gates]):
        model(ids)
    weights = [layer.self_attn.epilogue.gate_proj.weight for layer in model.model.layers]
    closed = [1 - torch.sigmoid(inputs[i] @ weight.mT) for i, weight in enumerate(weights)]
    for low, queries in BANDS.items():
        found = tiny.value(gates.measures(), "gate_closed", layer=1, map="gate", position=low)
        assert found == pytest.approx(closed[1][:, list(queries)].mean().item(), rel=1e-12)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_diagnosis_has_positions_beyond_the_training_length(tiny):
    longer = 2 * 64
    for preset, metric in (("softmax1", "null_mass"), ("gated", "gate_closed")):
        model = tiny.make(preset)
        assert model.config.max_position_embeddings < longer
        found = diagnose(model, tiny.windows(2, longer), batch_size=2).measures
        bands = [line for line in found if "position" in line and "layer" not in line]
        assert [line["position"] for line in bands] == [0, 1, 2, 4, 8, 16, 32, 64]
        assert {line["metric"] for line in bands} == {metric}
    plain = diagnose(tiny.make("transformer"), tiny.windows(2, 9), batch_size=2).measures
    assert not [line for line in plain if "position" in line]
