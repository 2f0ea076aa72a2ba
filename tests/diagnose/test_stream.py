"""Hidden states by every definition: by hand, and in float64."""

import math

import pytest
import torch
from torch import Tensor

from clearhead.diagnose.largest import Histogram, Largest
from clearhead.diagnose.stream import INPUT, StreamProfile, effective_rank

B, T, C = 3, 11, 19


def _central(x: Tensor, unbiased: bool = False) -> float:
    x = x.double().flatten()
    centred = x - x.mean()
    return float(centred.pow(4).mean() / x.var(unbiased=unbiased).square())


def _all(values: list[Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in values])


@pytest.mark.parametrize("shift", [0.0, 25.0])
def test_every_definition_against_float64(shift):
    batches = [torch.randn(B, T, C).pow(3) * 4 + shift for _ in range(3)]
    batches[1][:, 0, 5] = 400.0
    profile = StreamProfile()
    for x in batches:
        profile.observe(2, x)
    tokens = torch.cat(batches).double().flatten(0, 1)
    each = torch.stack([torch.tensor(_central(x)) for x in tokens])
    assert profile.value("kurtosis_excess", 2) == pytest.approx(each.mean().item() - 3, rel=1e-3)
    raw = tokens.pow(4).mean(-1) / tokens.var(-1).square() - 3
    relu = raw.clamp_min(0).mean().item()
    assert profile.value("kurtosis_excess_relu", 2) == pytest.approx(relu, rel=1e-3)
    assert profile.value("kurtosis_pooled", 2) == pytest.approx(_central(tokens), rel=1e-3)
    texts = torch.cat(batches)
    flat = sum(_central(x, unbiased=True) for x in texts) / len(texts)
    assert profile.value("kurtosis_flattened", 2) == pytest.approx(flat, rel=1e-3)
    s = tokens.square().mean(0)
    neurons = (s.square().mean() / s.mean().square()).item()
    assert profile.value("kurtosis_neurons", 2) == pytest.approx(neurons, rel=1e-5)
    lines = {
        (line["metric"], line.get("tokens"), line.get("layer")): line["value"]
        for line in profile.measures()
    }
    ranked = sorted(tokens.abs().flatten().tolist(), reverse=True)
    for rank in (1, 2, 3, 10, 100):
        assert lines[f"hidden_top_{rank}", None, None] == pytest.approx(ranked[rank - 1], rel=1e-6)
    per_token = _central(tokens[0])
    assert lines["kurtosis", "first", 2] != pytest.approx(per_token)  # a mean of nine
    norms = texts.double().norm(dim=-1)
    assert lines["norm_first", None, 2] == pytest.approx(norms[:, 0].mean().item(), rel=1e-5)
    assert lines["norm_rest", None, 2] == pytest.approx(norms[:, 1:].mean().item(), rel=1e-5)
    unit = texts.double() / norms[..., None]
    cosine = unit @ unit.mT
    off = (cosine.sum((1, 2)) - T) / (T * (T - 1))
    assert lines["similarity", None, 2] == pytest.approx(off.mean().item(), rel=1e-4)


def test_by_hand():
    """Two tokens on two channels: (1, −1) and (3, 1)."""
    profile = StreamProfile()
    profile.observe(0, torch.tensor([[[1.0, -1.0], [3.0, 1.0]]]))
    # Each token is two numbers the same way from their mean: kurtosis 1, excess −2.
    assert profile.value("kurtosis_excess", 0) == pytest.approx(-2)
    # (1 + 1)/2 / var² − 3 = 1/4 − 3 < 0, and (81 + 1)/2 / 4 − 3 = 7.25.
    assert profile.value("kurtosis_excess_relu", 0) == pytest.approx(7.25 / 2)
    # About the mean 1: 0, −2, 2, 0: mean fourth power 8, variance 2 (unbiased 8/3).
    assert profile.value("kurtosis_pooled", 0) == pytest.approx(8 / 4)
    assert profile.value("kurtosis_flattened", 0) == pytest.approx(8 / (64 / 9))
    # Mean squares by channel: 5 and 1.
    assert profile.value("kurtosis_neurons", 0) == pytest.approx(13 / 9)
    assert profile.value("similarity", 0) == pytest.approx(2 / math.sqrt(2 * 10))


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0])
def test_equal_numbers_have_no_kurtosis(value):
    profile = StreamProfile()
    profile.observe(0, torch.full((B, T, C), value))
    for metric in ("kurtosis_pooled", "kurtosis_flattened", "kurtosis_excess"):
        assert math.isnan(profile.value(metric, 0)), metric
    neurons = profile.value("kurtosis_neurons", 0)
    assert math.isnan(neurons) if value == 0 else neurons == pytest.approx(1)
    similarity = profile.value("similarity", 0)
    assert math.isnan(similarity) if value == 0 else similarity == pytest.approx(1)
    rank = profile.value("effective_rank", 0)
    assert math.isnan(rank) if value == 0 else rank == pytest.approx(1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_tokens_that_are_not_finite_are_counted_and_left_out(value):
    x = torch.randn(B, T, C)
    clean = StreamProfile()
    clean.observe(1, torch.cat([x[:1, :4], x[:1, 5:]], 1))
    x[0, 4, 2] = value
    profile = StreamProfile()
    profile.observe(1, x[:1])
    lines = {line["metric"]: line["value"] for line in profile.measures() if "layer" not in line}
    assert lines["non_finite_tokens"] == 1
    for metric in ("kurtosis_pooled", "kurtosis_neurons", "kurtosis_excess", "norm_rest"):
        assert profile.value(metric, 1) == pytest.approx(clean.value(metric, 1), rel=1e-4), metric
    assert lines["hidden_top_1"] < 10


def test_huge_numbers_do_not_overflow():
    x = torch.randn(1, T, C) * 1e18
    profile = StreamProfile()
    profile.observe(0, x)
    assert profile.value("kurtosis_pooled", 0) == pytest.approx(_central(x), rel=1e-3)


def test_effective_rank():
    q, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    assert effective_rank(q[:5]) == pytest.approx(5)
    assert effective_rank(torch.ones(7, 4)) == pytest.approx(1)
    singular = torch.tensor([3.0, 1.0], dtype=torch.float64)
    p = singular / 4
    expected = math.exp(-(p * p.log()).sum().item())
    assert effective_rank(q[:, :2] @ torch.diag(singular) @ q[:2, :]) == pytest.approx(expected)
    x = torch.randn(9, 30)
    s = torch.linalg.svdvals(x.double())
    p = s / s.sum()
    assert effective_rank(x) == pytest.approx(math.exp(-(p * p.log()).sum().item()), rel=1e-6)
    assert math.isnan(effective_rank(torch.zeros(0, 4)))
    assert math.isnan(effective_rank(torch.full((2, 2), math.nan)))


def test_outlier_channels_say_where_they_first_appear():
    profile = StreamProfile()
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
    largest, histogram = Largest(), Histogram()
    parts = [torch.randn(7, 41) * scale for scale in (1, 5, 2)]
    for part in parts:
        largest.add(part, part.abs().amax(-1) + 1)  # any bound above will do
        histogram.add(part)
    everything = _all(parts).abs().sort(descending=True).values
    for rank, value in largest.ranks().items():
        assert value == pytest.approx(everything[rank - 1].item(), rel=1e-6)
    assert histogram.median() == pytest.approx(everything.median().item(), rel=4e-3)
    assert Histogram().median() != Histogram().median()  # nothing counted: NaN
    zeros = Histogram()
    zeros.add(torch.zeros(3))
    assert zeros.median() == 0
    few = Largest()
    few.add(torch.tensor([[1.0, -2.0, 9.0]]), torch.tensor([9.0]), torch.tensor([[1, 1, 0]]).bool())
    assert few.ranks() == {1: 2.0, 2: 1.0}
