"""Hidden states: norms, similarity, ranks and outliers, by hand and in float64."""

import math

import pytest
import torch

from clearhead.diagnose.hidden import ResidualStream, effective_rank
from clearhead.diagnose.means import Sizes
from clearhead.probe.observation import INPUT

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
