"""Weight on no key by position: from the formulas, in float64."""

import pytest
import torch
from torch import nn

from clearhead.diagnose import diagnose
from clearhead.diagnose.attention_profile import ClosedGates, NullMass
from clearhead.ops.visibility import Visibility
from clearhead.probe import AttentionCall, ByTile, observe
from clearhead.probe import tiles as module_under_test
from clearhead.view.observation import AttentionTrace

B, H, T, D = 2, 3, 37, 5
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
