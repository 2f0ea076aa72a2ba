"""Statistics of attention, by hand and against the models' own attention matrices."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from clearhead import ClearheadError
from clearhead.diagnose import AttentionStatistics, attention_maps, attention_statistics
from clearhead.diagnose.weights import AttentionCall
from clearhead.models import with_rope_scaling
from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility

T = 13


def _run(model: nn.Module, ids: Tensor) -> AttentionStatistics:
    with torch.no_grad(), attention_statistics(model) as statistics:
        model(ids)
    return statistics


def _own_attentions(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions


def _check(statistics: AttentionStatistics, name: str, matrices: tuple[Tensor, ...]) -> None:
    """`statistics` are those of the matrices [B, H, T, T], a layer each, where none are tied."""
    visible = torch.ones(matrices[0].shape[-2:]).tril().bool()
    for layer, weights_BHTT in enumerate(matrices):
        largest = weights_BHTT.masked_fill(~visible, -torch.inf).argmax(-1)
        share = (largest == 0).double().mean((0, 2))
        mass = weights_BHTT[..., 0].double().mean((0, 2))
        assert torch.equal(statistics.heads("first_token_argmax_share", name, layer), share)
        assert torch.allclose(
            statistics.heads("first_token_mass", name, layer), mass, rtol=1e-5, atol=1e-6
        )
    shares = torch.stack([w.masked_fill(~visible, -torch.inf).argmax(-1) == 0 for w in matrices])
    pooled = statistics.pooled("first_token_argmax_share", name)
    assert pooled == pytest.approx(shares.double().mean().item(), rel=1e-12)
    assert 0.1 < pooled < 0.9  # the test would see a difference


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "transformer", "softmax1", "gpt2"])
def test_as_from_the_models_own_matrices(tiny, name):
    model, ids = tiny.make(name), torch.stack(tiny.windows(4, T))
    statistics = _run(model, ids)
    matrices = _own_attentions(model, ids)
    _check(statistics, "softmax", matrices)
    assert statistics.maps() == ["softmax"]
    null = statistics.pooled("null_mass", "softmax")
    if name == "softmax1":
        expected = torch.stack([1 - w.sum(-1) for w in matrices]).mean().item()
        assert null == pytest.approx(expected, rel=1e-4)
        assert null > 0.05
    else:
        assert null is None


def test_sinks_and_capped_scores_of_other_models(tiny):
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 61,
        "initializer_range": 0.6,
        "attn_implementation": "eager",
    }
    oss = GptOssForCausalLM(
        GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1, pad_token_id=None)
    ).eval()
    gemma = Gemma2ForCausalLM(
        Gemma2Config(**shape, query_pre_attn_scalar=6, attn_logit_softcapping=1.5)
    ).eval()
    ids = torch.stack(tiny.windows(3, T))
    for model in (oss, gemma):
        matrices = _own_attentions(model, ids)
        statistics = _run(model, ids)
        _check(statistics, "softmax", matrices)
        null = statistics.pooled("null_mass", "softmax")
        if model is oss:
            expected = torch.stack([1 - w.sum(-1) for w in matrices]).mean().item()
            assert null == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
def test_differential_maps_and_their_difference(tiny, monkeypatch, normalizer):
    calls: list[AttentionCall] = []
    observe = AttentionStatistics.observe
    monkeypatch.setattr(
        AttentionStatistics,
        "observe",
        lambda self, call: (calls.append(call), observe(self, call))[1],
    )
    model = tiny.ours("differential", normalizer=normalizer)
    ids = torch.stack(tiny.windows(4, T))
    statistics = _run(model, ids)
    assert statistics.maps() == ["map 1", "map 2", "difference"]
    sink = 0.0 if normalizer == "softmax1" else None
    first, second, difference = [], [], []
    for call in calls:
        weights = oracles.weights(call.q, call.k, sink=sink)
        first.append(weights[:, :2])  # 4 baseline heads are 2 pairs
        second.append(weights[:, 2:])
        lam = call.module.maps.lambdas().double()
        difference.append(first[-1] - lam * second[-1])
    _check(statistics, "map 1", tuple(first))
    _check(statistics, "map 2", tuple(second))
    _check(statistics, "difference", tuple(difference))
    # The model's own signed matrices, independent of what the probe was handed.
    _check(statistics, "difference", _own_attentions(model, ids))
    assert statistics.pooled("null_mass", "difference") is None
    assert (statistics.pooled("null_mass", "map 2") is None) == (sink is None)


def test_differential_v2_has_its_own_weight_for_each_token(tiny):
    model = tiny.ours("differential-v2")
    ids = torch.stack(tiny.windows(4, T))
    statistics = _run(model, ids)
    assert statistics.maps() == ["map 1", "map 2", "difference"]
    _check(statistics, "difference", _own_attentions(model, ids))


def test_the_signed_argmax_ignores_hidden_keys(tiny, monkeypatch):
    """With λ = 3 nearly every signed weight is below 0, the weight of a hidden key."""
    model = tiny.ours("differential")
    for layer in model.model.layers:
        maps = layer.self_attn.maps
        monkeypatch.setattr(maps, "lambdas", lambda x: torch.tensor(3.0))
        layer.self_attn.q_proj.weight.data.zero_()
    statistics = _run(model, torch.stack(tiny.windows(2, T)))
    # Uniform maps: all visible weights of a row are equal, (1 − 3) / (i + 1).
    share = statistics.pooled("first_token_argmax_share", "difference")
    assert share == pytest.approx(tiny.harmonic(T), rel=1e-6)
    mass = statistics.pooled("first_token_mass", "difference")
    assert mass == pytest.approx(-2 * tiny.harmonic(T), rel=1e-6)


@pytest.mark.parametrize("name", ["transformer", "softmax1", "Llama"])
def test_uniform_attention_is_at_chance(tiny, name):
    model = tiny.make(name)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    statistics = _run(model, torch.stack(tiny.windows(2, T)))
    assert statistics.pooled("chance_floor", "softmax") == pytest.approx(tiny.harmonic(T))
    for layer in (None, 0, 2):
        share = statistics.pooled("first_token_argmax_share", "softmax", layer)
        assert share == pytest.approx(tiny.harmonic(T), rel=1e-6)
    mass = statistics.pooled("first_token_mass", "softmax")
    if name == "softmax1":  # the null key is one more: 1/(i + 2)
        expected = sum(1 / (i + 2) for i in range(T)) / T
        assert statistics.pooled("null_mass", "softmax") == pytest.approx(expected, rel=1e-6)
        assert mass == pytest.approx(expected, rel=1e-6)
    else:
        assert mass == pytest.approx(tiny.harmonic(T), rel=1e-6)


def test_by_hand():
    """Two queries on two keys of width 1: the second query prefers key 1, by e to 1."""
    statistics = AttentionStatistics()
    q, k = torch.tensor([[[[1.0], [1.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
    common = {"module": nn.Identity(), "layer": 7, "scale": 1.0}
    statistics.observe(AttentionCall(q=q, k=k, **common))
    assert statistics.layers() == [7]
    assert statistics.pooled("first_token_argmax_share", "softmax") == 0.5
    mass = (1 + 1 / (1 + torch.e)) / 2
    assert statistics.pooled("first_token_mass", "softmax") == pytest.approx(mass, rel=1e-6)
    assert statistics.pooled("chance_floor", "softmax") == 0.75
    assert statistics.pooled("first_token_mass", "softmax", layer=6) is None
    # The same call again, and nothing changes but the count; then a row that sees no key.
    statistics.observe(AttentionCall(q=q, k=k, **common))
    hidden = Visibility(key_mask=torch.tensor([[False, False]]))
    statistics.observe(AttentionCall(q=q, k=k, visibility=hidden, **common))
    assert statistics.pooled("first_token_mass", "softmax") == pytest.approx(mass, rel=1e-6)


def test_measures_name_every_layer_and_head(tiny):
    model = tiny.make("differential")
    lines = _run(model, torch.stack(tiny.windows(2, T))).measures()
    share = [line for line in lines if line["metric"] == "first_token_argmax_share"]
    assert len(share) == 3 * (1 + 3 + 3 * 2)  # maps × (pooled, layers, layers × pairs)
    mean = sum(line["value"] for line in share if line["map"] == "map 1" and "head" in line) / 6
    pooled = [line for line in share if line["map"] == "map 1" and "layer" not in line]
    assert [line["value"] for line in pooled] == [pytest.approx(mean)]
    floors = [line for line in lines if line["metric"] == "chance_floor"]
    assert floors == [{"metric": "chance_floor", "value": pytest.approx(tiny.harmonic(T))}]
    assert not [line for line in lines if line["metric"] == "null_mass"]


@pytest.mark.parametrize("name", ["transformer", "softmax1", "Llama", "GPT-2"])
def test_attention_maps(tiny, name):
    model, ids = tiny.make(name), tiny.windows(1, T)[0]
    model.train()
    maps = attention_maps(model, ids)
    assert model.training
    model.eval()
    assert [(m["layer"], m["head"]) for m in maps] == [(i, h) for i in range(3) for h in range(4)]
    matrices = _own_attentions(model, ids[None])
    for line in maps:
        found = torch.tensor(line["weights"])
        assert torch.allclose(found, matrices[line["layer"]][0, line["head"]], atol=6e-5)
        assert line["map"] == "softmax"
        assert all(round(w, 4) == w for row in line["weights"] for w in row)
    assert [m["layer"] for m in attention_maps(model, ids, layers=[2])] == [2] * 4


def test_differential_attention_maps(tiny):
    model, ids = tiny.make("differential"), tiny.windows(1, T)[0]
    maps = {
        (m["layer"], m["head"], m["map"]): torch.tensor(m["weights"])
        for m in attention_maps(model, ids)
    }
    assert len(maps) == 3 * 2 * 3
    for layer, head in ((0, 0), (2, 1)):
        lam = model.model.layers[layer].self_attn.maps.lambdas().item()
        expected = maps[layer, head, "map 1"] - lam * maps[layer, head, "map 2"]
        assert torch.allclose(maps[layer, head, "difference"], expected, atol=2e-4)
        assert (maps[layer, head, "difference"] < 0).any()


def test_a_padded_batch_under_dynamic_causal_counts_every_query_once(tiny):
    """Rows reach the next base at different columns, which calls of either base then have."""
    model = with_rope_scaling(tiny.make("softmax1"), "dynamic-causal", factor=4)
    trained = model.config.max_position_embeddings
    ids = torch.randint(0, model.config.vocab_size, (2, trained + 20))
    mask = torch.ones_like(ids)
    mask[1, : trained // 2 + 10] = 0
    with torch.no_grad(), attention_statistics(model) as together:
        model(ids, attention_mask=mask)
    with torch.no_grad(), attention_statistics(model) as alone:
        for row, kept in zip(ids, mask.bool(), strict=True):
            model(row[kept][None])
    for layer in together.layers():
        found, want = (s.heads("null_mass", "softmax", layer) for s in (together, alone))
        assert torch.allclose(found, want, rtol=1e-4)
    assert _queries(together) == _queries(alone) == int(mask.sum()) * 3 * 4


def _queries(statistics: AttentionStatistics) -> int:
    """How many (layer, head, query) have been counted."""
    return int(sum(found["null_mass"][1].sum() for found in statistics._sums.values()))


def test_attention_maps_refuse(tiny):
    model = tiny.make("transformer")
    for ids in (torch.zeros(65, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)):
        with pytest.raises(ClearheadError, match="one text of 1 to 64 tokens"):
            attention_maps(model, ids)
    with pytest.raises(ClearheadError, match=r"layer 3: found layers \[0, 1, 2\]"):
        attention_maps(model, tiny.windows(1)[0], layers=[1, 3])


def test_unknown_metric(tiny):
    statistics = AttentionStatistics()
    with pytest.raises(ClearheadError, match="did you mean null_mass"):
        statistics.pooled("nul_mass", "softmax")
