"""Kurtosis, also in OrthoAdam's basis, and largest activations, by hand and in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from clearhead.diagnose import HiddenStatistics, RotatedKurtosis, kurtosis
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe import measure, observe


def _kurtosis64(x: Tensor) -> Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return centred.pow(4).mean(-1) / centred.pow(2).mean(-1).square()


@pytest.mark.parametrize("width", [2, 3, 17, 512])
def test_kurtosis_of_one_hot_is_the_largest_there_is(width):
    x = torch.zeros(width)
    x[width // 2] = 5.0
    expected = width - 2 + 1 / (width - 1)
    for scale, shift in ((1.0, 0.0), (-1e30, 0.0), (1e-30, 0.0), (1.0, 3.0)):
        assert kurtosis(x * scale + shift).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kurtosis_against_float64(dtype):
    x = (torch.randn(3, 7, 33).pow(3) + 10).to(dtype)
    found = kurtosis(x)
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.allclose(found.double(), _kurtosis64(x), rtol=1e-4)


def test_kurtosis_is_undefined_in_constant_and_non_finite_rows():
    rows = torch.tensor([0.0, 0.1, 1e30, 2.0, 3.0])[:, None].repeat(1, 7)  # not all means are exact
    rows[3, 0], rows[4, 0] = torch.inf, torch.nan
    assert kurtosis(rows).isnan().all()
    assert kurtosis(torch.ones(1)).isnan()


def test_first_and_rest_by_hand(tiny):
    x = torch.zeros(2, 3, 5)
    x[0, 0, 1], x[1, 0, 4] = 7.0, -9.0  # first tokens: one-hot
    x[0, 1] = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])  # 34/5 / 2² = 1.7
    x[0, 2] = 4.0  # constant: without a kurtosis
    x[1, 1, 4] = x[1, 2, 0] = 1.0
    statistics = HiddenStatistics()
    for sample in x:  # in two batches
        statistics.observe(0, sample[None])
    statistics.observe(1, torch.ones(2, 3, 5))  # the mean over layers leaves it out
    one_hot, lines = 5 - 2 + 1 / 4, statistics.measures()
    for metric, tokens, value in (
        ("kurtosis", "first", one_hot),
        ("kurtosis", "rest", (1.7 + 2 * one_hot) / 3),
        ("largest_activation", "first", 8.0),
        ("largest_activation", "rest", (2 + 4 + 1 + 1) / 4),
    ):
        found = tiny.value(lines, metric, tokens=tokens, layer=0)
        assert found == pytest.approx(value), (metric, tokens)
        if metric == "kurtosis":
            assert tiny.value(lines, metric, tokens=tokens) == pytest.approx(value)
            assert math.isnan(tiny.value(lines, metric, tokens=tokens, layer=1))
    assert tiny.value(lines, "kurtosis_excess") == pytest.approx((4 * one_hot + 1.7) / 5 - 3)
    assert tiny.value(lines, "largest_activation", tokens="first") == (8.0 + 1.0) / 2


@pytest.mark.parametrize("name", ["transformer", "differential", "Llama", "GPT-2"])
def test_layers_of_a_model_against_float64(tiny, name):
    model, ids = tiny.make(name), torch.stack(tiny.windows(3))
    statistics = HiddenStatistics()
    with torch.no_grad(), observe(model, hidden=[statistics]):
        hidden = model(ids, output_hidden_states=True).hidden_states
    lines = statistics.measures()
    # The last entry that transformers gives is after the final norm; the others are block outputs.
    for layer, x in enumerate(hidden[1:-1]):
        largest, shape = x.double().abs().amax(-1), _kurtosis64(x)
        for tokens, part in (("first", slice(0, 1)), ("rest", slice(1, None))):
            for metric, x in (("kurtosis", shape), ("largest_activation", largest)):
                found = tiny.value(lines, metric, tokens=tokens, layer=layer)
                assert found == pytest.approx(x[:, part].mean().item(), rel=1e-4)
        excess = tiny.value(lines, "kurtosis_excess", layer=layer)
        assert excess == pytest.approx(shape.mean().item() - 3, rel=1e-4)
    by_layer = [tiny.value(lines, "kurtosis", tokens="rest", layer=layer) for layer in range(3)]
    assert tiny.value(lines, "kurtosis", tokens="rest") == pytest.approx(sum(by_layer) / 3)


@pytest.mark.parametrize("share", ["parameter", "size"])
@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_the_rotated_kurtosis_is_that_of_the_states_in_the_embeddings_basis(tiny, kind, share):
    model, texts = tiny.make("transformer").train(), tiny.windows(3)
    rotated = RotatedKurtosis(model, kind=kind, seed=3, share=share)
    lines = measure(model, texts, batch_size=2, hidden=[rotated])
    assert model.training
    assert {line["rotation_share"] for line in lines} == {share}
    basis = make_rotation(kind, seed=3, size=24).apply(torch.eye(24)).mT.double()
    if share == "parameter":
        key = sign_key(3, "model.embed_tokens.weight", -1)
        basis = basis * random_signs([key], 24, torch.device("cpu"))
    statistic = SimpleNamespace(observe=lambda layer, x: states.update({layer: x.double()}))
    states: dict[int, Tensor] = {}
    with torch.no_grad(), observe(model.eval(), hidden=[statistic]):
        model(torch.stack(texts))
    values = torch.stack([_kurtosis64(states[layer] @ basis.T) for layer in range(3)])
    for tokens, part in (("first", values[..., :1]), ("rest", values[..., 1:])):
        found = {line.get("layer"): line["value"] for line in lines if line["tokens"] == tokens}
        wanted = {None: part.mean().item()} | dict(enumerate(part.mean((1, 2)).tolist()))
        assert found == pytest.approx(wanted, rel=1e-5)
