"""Kurtosis, also in OrthoAdam's basis, and largest activations, by hand and in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from clearhead.diagnose import HiddenStatistics, RotatedKurtosis, kurtosis
from clearhead.diagnose.hidden import ResidualStream, effective_rank
from clearhead.diagnose.means import Sizes
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe import measure, observe
from clearhead.probe.observation import INPUT


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


B, T, C = 3, 11, 19


@pytest.mark.parametrize("shift", [0.0, 25.0])
def test_sizes_norms_and_similarity_against_float64(tiny, shift):
    batches = [torch.randn(B, T, C).pow(3) * 4 + shift for _ in range(3)]
    batches[1][:, 0, 5] = 400.0
    profile = ResidualStream()
    for x in batches:
        profile.observe(2, x)

    texts, lines = torch.cat(batches).double(), profile.measures()
    ranked = sorted(texts.abs().flatten().tolist(), reverse=True)
    for rank in (1, 2, 3, 10, 100):
        found = tiny.value(lines, f"hidden_top_{rank}")
        assert found == pytest.approx(ranked[rank - 1], rel=1e-6)
    norms = texts.norm(dim=-1)
    unit = texts / norms[..., None]
    off = ((unit @ unit.mT).sum((1, 2)) - T) / (T * (T - 1))
    for metric, x in (
        ("norm_first", norms[:, 0]),
        ("norm_rest", norms[:, 1:]),
        ("similarity", off),
    ):
        found = tiny.value(lines, metric, layer=2)
        assert found == pytest.approx(x.mean().item(), rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0])
def test_equal_tokens_are_alike_and_of_rank_one(tiny, value):
    profile = ResidualStream()
    profile.observe(0, torch.full((B, T, C), value))
    similarity = tiny.value(profile.measures(), "similarity", layer=0)
    assert math.isnan(similarity) if value == 0 else similarity == pytest.approx(1)
    rank = tiny.value(profile.measures(), "effective_rank", layer=0)
    assert math.isnan(rank) if value == 0 else rank == pytest.approx(1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_tokens_that_are_not_finite_are_counted_and_left_out(tiny, value):
    x = torch.randn(B, T, C)
    clean = ResidualStream()
    clean.observe(1, torch.cat([x[:1, :4], x[:1, 5:]], 1))
    x[0, 4, 2] = value
    profile = ResidualStream()
    profile.observe(1, x[:1])
    lines = {line["metric"]: line["value"] for line in profile.measures() if "layer" not in line}
    assert lines["non_finite_tokens"] == 1
    for metric in ("similarity", "norm_rest"):
        found, wanted = (tiny.value(p.measures(), metric, layer=1) for p in (profile, clean))
        assert found == pytest.approx(wanted, rel=1e-4), metric
    assert lines["hidden_top_1"] < 10


def test_the_median_is_of_all_channels_and_of_finite_tokens(tiny):
    """Channels of a trained model differ in size, and widths are multiples of 8."""
    x = torch.randn(4, 64, 64) * torch.randn(64).exp()
    x[:, :, ::8] *= 1e-3
    x[:, 24:] = math.nan
    profile = ResidualStream()
    profile.observe(1, x)
    wanted = float(x[:, :24].abs().median())
    assert tiny.value(profile.measures(), "hidden_median") == pytest.approx(wanted, rel=0.15)


def test_effective_rank():
    q, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    assert effective_rank(q[:5]) == pytest.approx(5)
    assert effective_rank(torch.ones(7, 4)) == pytest.approx(1)
    x = torch.randn(9, 30)
    s = torch.linalg.svdvals(x.double())
    p = s / s.sum()
    assert effective_rank(x) == pytest.approx(math.exp(-(p * p.log()).sum().item()), rel=1e-6)
    assert math.isnan(effective_rank(torch.zeros(0, 4)))
    assert math.isnan(effective_rank(torch.full((2, 2), math.nan)))


def test_outlier_channels_say_where_they_first_appear():
    profile = ResidualStream()
    for layer in (INPUT, 0, 1, 2):
        x = torch.randn(2, 64, 32)
        if layer >= 1:
            x[:, 0, 7] = 100.0 * layer
        if layer == 2:
            x[:, 30, 9] = -60.0
        profile.observe(layer, x)
    first, second = profile.outliers()
    assert (first["channel"], first["first_layer"], first["layer"]) == (7, 1, 2)
    assert (first["tokens"], first["of"]) == ("first", 2)
    assert first["largest"] == pytest.approx(200)
    assert first["medians"] == pytest.approx(200 / 0.6745, rel=0.1)
    assert (second["channel"], second["first_layer"], second["tokens"]) == (9, 2, "rest")


def test_largest_and_median():
    sizes, halves = Sizes(), (Sizes(), Sizes())
    parts = [torch.randn(7, 41) * scale for scale in (1, 5, 2)]
    for place, part in enumerate(parts):
        for one in (sizes, halves[place % 2]):
            one.add(part, part.abs().amax(-1) + 1)  # any bound above will do
            one.count(part)
    everything = torch.cat(parts).double().abs().flatten().sort(descending=True).values
    for one in (sizes, Sizes(halves)):
        for rank, value in one.ranks().items():
            assert value == pytest.approx(everything[rank - 1].item(), rel=1e-6)
        assert one.median() == pytest.approx(everything.median().item(), rel=4e-3)
    assert math.isnan(Sizes().median())  # nothing counted
    zeros = Sizes()
    zeros.count(torch.zeros(3))
    assert zeros.median() == 0
    few = Sizes()
    few.add(torch.tensor([[1.0, -2.0, 9.0]]), torch.tensor([9.0]), torch.tensor([[1, 1, 0]]).bool())
    assert few.ranks() == {1: 2.0, 2: 1.0}
