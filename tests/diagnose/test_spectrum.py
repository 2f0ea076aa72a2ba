"""Spectra of attention's matrix, against the models' own matrices."""

import pytest
import torch
from torch import nn

from clearhead import ops
from clearhead.diagnose import spectrum as module_under_test
from clearhead.diagnose.spectrum import Spectrum
from clearhead.ops.visibility import Visibility
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe


def _rank(matrix: torch.Tensor) -> float:
    s = torch.linalg.svdvals(matrix.double())
    p = s / s.sum()
    return float(torch.exp(-(p * p.log()).sum())) / len(s)


@pytest.mark.parametrize("name", ["Llama", "softmax1", "differential", "differential-v2"])
@pytest.mark.parametrize("tokens", [128, 9])
def test_against_the_models_own_matrices(tiny, name, tokens, monkeypatch):
    monkeypatch.setattr(module_under_test, "TOKENS", tokens)
    model, ids = tiny.make(name), torch.stack(tiny.windows(3, 13))
    profile = Spectrum()
    with torch.no_grad(), observe(model, attention=[profile]):
        model(ids)
        model(ids.flip(0))  # later texts do not count
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(ids, output_attentions=True).attentions
    n = min(tokens, 13)
    for layer, matrix in enumerate(matrices):
        heads = matrix[0, :, :n, :n]
        expected = torch.linalg.svdvals(heads.double()).mean(0)
        assert torch.allclose(profile.values[layer], expected, atol=1e-5)
        mean = sum(_rank(head) for head in heads) / len(heads)
        assert profile.ranks[layer] == pytest.approx(mean, rel=1e-4)
    uniform = torch.ones(n, n, dtype=torch.float64).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    assert torch.allclose(profile.centre, torch.linalg.svdvals(uniform))
    assert [line["map"] for line in profile.curves()] == ["matrix"] * 3 + ["C"]


@pytest.mark.parametrize(
    ("name", "position"),
    [("skipless", "rope"), ("sas", "rope"), ("sas-p", "rope"), ("sas", "alibi")],
)
def test_a_shaped_matrix_starts_as_the_identity(tiny, name, position):
    model = tiny.ours(name, position=position, num_key_value_heads=4)
    profile = Spectrum()
    with torch.no_grad(), observe(model, attention=[profile]):
        model(torch.stack(tiny.windows(2, 13)))
        for layer in range(3):
            assert profile.ranks[layer] == pytest.approx(1, abs=1e-5)
            assert torch.allclose(profile.values[layer], torch.ones(13).double(), atol=1e-5)
    slopes = ops.alibi_slopes(4)[:, None, None] * (position == "alibi")
    at = torch.arange(13).double()
    bias = (slopes * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    expected = torch.linalg.svdvals(bias.softmax(-1)).mean(0)
    assert torch.allclose(profile.centre, expected, atol=1e-5)
    block = model.model.layers[1].self_attn
    with torch.no_grad():
        block.shaping.alpha.fill_(0.5)
        block.q_proj.weight.normal_()
    ids, profile = torch.stack(tiny.windows(2, 13)), Spectrum()
    with torch.no_grad(), observe(model, attention=[profile]):
        model(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(ids, output_attentions=True).attentions
    for layer, matrix in enumerate(matrices):
        expected = torch.linalg.svdvals(matrix[0].double()).mean(0)
        assert torch.allclose(profile.values[layer], expected, atol=1e-5)
    assert profile.ranks[1] < 0.99


def test_the_identity_and_one_direction():
    size, everything = 12, Visibility(causal=False)
    common = {"module": nn.Identity(), "scale": 1.0, "visibility": everything}
    eye = 200 * torch.eye(size)[None, None]
    profile = Spectrum()
    profile.observe(AttentionCall(layer=0, q=eye, k=eye, **common))
    nothing = torch.zeros(1, 1, size, 3)
    profile.observe(AttentionCall(layer=1, q=nothing, k=nothing, **common))
    assert profile.ranks[0] == pytest.approx(1)
    assert profile.ranks[1] == pytest.approx(1 / size)
    assert {line["layer"] for line in profile.measures()} == {0, 1}


def test_matrices_that_are_not_finite_are_left_out():
    q = torch.full((1, 1, 4, 2), torch.nan)
    profile = Spectrum()
    call = {"module": nn.Identity(), "layer": 0, "scale": 1.0}
    profile.observe(AttentionCall(q=q, k=q, **call))
    assert profile.measures() == []
    assert profile.curves() == []
