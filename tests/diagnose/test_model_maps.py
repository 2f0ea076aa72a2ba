"""Statistics of attention against the models' own attention matrices."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.diagnose.attention_profile import Lambdas, RowMeans
from clearhead.models import with_rope_scaling
from clearhead.ops import oracles
from clearhead.probe import ByTile, observe

SHORT = 13


def _run(model: nn.Module, ids: Tensor, *more: Any) -> list[dict[str, Any]]:
    means = RowMeans()
    with torch.no_grad(), observe(model, attention=[ByTile(weights=[means]), *more]):
        model(ids)
    return means.measures()


def _own_attentions(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions


def _check(tiny: Any, lines: list[dict], name: str, matrices: tuple[Tensor, ...]) -> None:
    """`lines` are of the matrices [B, H, T, T], a layer each, where none are tied."""
    visible = torch.ones(matrices[0].shape[-2:]).tril().bool()
    shares = []
    for layer, weights_BHTT in enumerate(matrices):
        largest = weights_BHTT.masked_fill(~visible, -torch.inf).argmax(-1)
        shares.append((largest == 0).double())
        for head, share in enumerate(shares[-1].mean((0, 2)).tolist()):
            place = {"map": name, "layer": layer, "head": head}
            assert tiny.value(lines, "first_token_argmax_share", **place) == pytest.approx(share)
            mass = weights_BHTT[:, head, :, 0].double().mean().item()
            found = tiny.value(lines, "first_token_mass", **place)
            assert found == pytest.approx(mass, rel=1e-5, abs=1e-6)
    pooled = tiny.value(lines, "first_token_argmax_share", map=name)
    assert pooled == pytest.approx(torch.stack(shares).mean().item(), rel=1e-12)
    assert 0.1 < pooled < 0.9  # the test would see a difference


def _maps(lines: list[dict]) -> list[str]:
    return list(dict.fromkeys(line["map"] for line in lines if "map" in line))


@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", "transformer", "gpt2", "softmax1", "gpt-oss", "Gemma2"]
)
def test_as_from_the_models_own_matrices(tiny, name):
    wide = {"sliding_window": 64} if name in ("gpt-oss", "Gemma2") else {}
    model, ids = tiny.make(name, **wide), torch.stack(tiny.windows(4, SHORT))
    lines, matrices = _run(model, ids), _own_attentions(model, ids)
    _check(tiny, lines, "softmax", matrices)
    assert _maps(lines) == ["softmax"]
    if name in ("softmax1", "gpt-oss"):
        null = tiny.value(lines, "null_mass", map="softmax")
        expected = torch.stack([1 - w.sum(-1) for w in matrices]).mean().item()
        assert null == pytest.approx(expected, rel=1e-4)
        assert null > 0.05
    else:
        assert not [line for line in lines if line["metric"] == "null_mass"]


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
@pytest.mark.parametrize("name", ["differential", "differential-v2"])
def test_differential_maps_and_their_signed_difference(tiny, name, normalizer):
    calls, lambdas = tiny.Calls(), Lambdas()
    model = tiny.ours(name, normalizer=normalizer)
    ids = torch.stack(tiny.windows(4, SHORT))
    lines = _run(model, ids, calls, ByTile(weights=[lambdas]))
    assert _maps(lines) == ["map 1", "map 2", "difference"]
    # The model's own signed matrices, independent of what the probe was handed.
    _check(tiny, lines, "difference", _own_attentions(model, ids))
    nulls = {line["map"] for line in lines if line["metric"] == "null_mass"}
    assert nulls == (set() if normalizer == "softmax" else {"map 1", "map 2"})
    found = lambdas.measures()
    assert [line["layer"] for line in found] == [0, 1, 2]
    if name == "differential":
        sink = 0.0 if normalizer == "softmax1" else None
        weights = [oracles.weights(call.q, call.k, sink=sink) for call in calls]
        _check(tiny, lines, "map 1", tuple(w[:, :2] for w in weights))  # 4 heads are 2 pairs
        _check(tiny, lines, "map 2", tuple(w[:, 2:] for w in weights))
        wanted = [layer.self_attn.maps.lambdas().item() for layer in model.model.layers]
        assert [line["value"] for line in found] == pytest.approx(wanted)


def test_the_matrix_of_a_shaped_block(tiny):
    model, ids = tiny.ours("sas", num_key_value_heads=4), torch.stack(tiny.windows(3, SHORT))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.shaping.alpha.fill_(0.5)
            layer.self_attn.q_proj.weight.normal_(0, 0.4)
    lines = _run(model, ids)
    assert _maps(lines) == ["softmax", "shaped"]
    _check(tiny, lines, "shaped", _own_attentions(model, ids))


def test_the_signed_argmax_ignores_hidden_keys(tiny):
    """With λ = 3 nearly every signed weight is below 0, the weight of a hidden key."""
    model = tiny.ours("differential")
    with torch.no_grad():
        for layer in model.model.layers:
            maps = layer.self_attn.maps
            for vector in (maps.lambda_q2, maps.lambda_k2):
                vector.zero_()
            # λ = exp(q1 · k1) − 1 + λ_init
            product = math.log(4 - maps.lambda_init)
            for vector in (maps.lambda_q1, maps.lambda_k1):
                vector.fill_(math.sqrt(product / vector.numel()))
            layer.self_attn.q_proj.weight.zero_()
    lines = _run(model, torch.stack(tiny.windows(2, SHORT)))
    # Uniform maps: all visible weights of a row are equal, (1 − 3) / (i + 1).
    share = tiny.value(lines, "first_token_argmax_share", map="difference")
    assert share == pytest.approx(tiny.harmonic(SHORT), rel=1e-6)
    mass = tiny.value(lines, "first_token_mass", map="difference")
    assert mass == pytest.approx(-2 * tiny.harmonic(SHORT), rel=1e-5)


def test_a_padded_batch_under_a_dynamic_base_has_the_means_of_its_texts(tiny):
    model = with_rope_scaling(tiny.make("softmax1"), "dynamic", factor=4)
    trained = model.config.max_position_embeddings
    ids = torch.randint(0, model.config.vocab_size, (2, trained + 20))
    mask = torch.ones_like(ids)
    mask[1, : trained // 2 + 10] = 0
    together, alone = RowMeans(), RowMeans()
    with torch.no_grad(), observe(model, attention=[ByTile(weights=[together])]):
        model(ids, attention_mask=mask)
    with torch.no_grad(), observe(model, attention=[ByTile(weights=[alone])]):
        for row, kept in zip(ids, mask.bool(), strict=True):
            model(row[kept][None])
    lines = [line for line in together.measures() if line["metric"] == "null_mass"]
    assert len(lines) == 1 + 3 + 3 * 4
    for line in lines:
        place = {name: value for name, value in line.items() if name not in ("metric", "value")}
        want = tiny.value(alone.measures(), "null_mass", **place)
        assert line["value"] == pytest.approx(want, rel=1e-4)
