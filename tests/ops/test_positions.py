"""Positions against transformers' own frequencies, the papers' reference values, and oracles."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from clearhead.ops import (
    alibi_columns,
    alibi_slopes,
    dynamic_theta,
    frequencies,
    ntk_theta,
    oracles,
    rotary_table,
    rotate,
    with_columns,
    xpos_tables,
)

CPU = torch.device("cpu")
TRAINED = 512


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=["linear", "yarn", "yarn-ramp", "yarn-mscale", "yarn-factor", "llama3"],
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_are_transformers(scaling, theta):
    rope = {"rope_theta": theta, **scaling}
    if scaling["rope_type"] != "linear":
        rope["original_max_position_embeddings"] = TRAINED
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    want, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, CPU)
    got, factor = frequencies(rope, 64, CPU)
    assert torch.allclose(got, want, rtol=2e-6)
    assert factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("length", [1, 512, 513, 1024, 5000])
def test_dynamic_frequencies_are_transformers(length):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=length)
    theta = dynamic_theta(10_000.0, 4.0, 64, torch.tensor(length), 512)
    assert torch.allclose(frequencies(rope, 64, CPU, theta)[0], want, rtol=1e-5)


def test_reference_values_of_ntk():
    for factor, base in ((2, 20452.23), (4, 41829.37), (8, 85550.38), (16, 174969.59)):
        assert ntk_theta(10_000, factor, 64) == pytest.approx(base, abs=0.01)
    lengths = torch.tensor([1, 512, 513, 1024, 2048, 4096, 8192, 16384, 32768])
    bases = [1e4, 1e4, 10080.66, 52664.43, 141213.76, 323275.0, 696500.0, 1460670.5, 3024409.1]
    got = dynamic_theta(10_000.0, 4.0, 64, lengths, 512)
    assert got.tolist() == pytest.approx(bases, rel=2e-6)


@pytest.mark.parametrize(
    ("factor", "attention_factor", "ratios"),
    [
        (8.0, 1.207944, [1, 1, 0.93269, 0.66346, 0.19231, 0.125, 0.125]),
        (4.0, 1.138629, [1, 1, 0.94231, 0.71154, 0.30769, 0.25, 0.25]),
    ],
)
def test_reference_values_of_yarn(factor, attention_factor, ratios):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor}
    got, found = frequencies(rope | {"original_max_position_embeddings": 512}, 64, CPU)
    plain, _ = frequencies({"rope_type": "default", "rope_theta": 1e4}, 64, CPU)
    assert found == pytest.approx(attention_factor, abs=1e-6)
    pairs = [0, 3, 4, 8, 15, 16, 31]
    assert (got / plain)[pairs].tolist() == pytest.approx(ratios, abs=1e-5)


def test_the_attention_factor_scales_scores_by_its_square():
    frequency, _ = frequencies({"rope_type": "default", "rope_theta": 1e4}, 8, CPU)
    at = torch.arange(5)[None]
    plain, scaled = rotary_table(at, frequency), rotary_table(at, frequency, 1.2)
    assert torch.allclose(scaled[0] ** 2 + scaled[1] ** 2, torch.tensor(1.44))
    assert torch.allclose(plain[0] ** 2 + plain[1] ** 2, torch.tensor(1.0))


def test_slopes():
    eighths = [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(8).tolist() == eighths
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-h / 2) for h in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx(
        [*eighths, 0.707107, 0.353553, 0.176777, 0.088388], abs=1e-6
    )
    assert alibi_slopes(6).tolist() == pytest.approx(
        [0.25, 0.0625, 0.015625, 0.003906, 0.5, 0.125], abs=1e-6
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("start", [0, 16_000, 65_000])
def test_columns_carry_the_distance_in_every_dtype(heads, dtype, start):
    """The product of the rounded columns, summed as a kernel would, is −slope · (i − j)."""
    at = torch.arange(start, start + 300)[None]
    q, k = alibi_columns(at, at, alibi_slopes(heads), 32**-0.5)
    for columns in (q, k):
        # float16 may be short of range, not of digits.
        assert torch.equal(columns.bfloat16().float(), columns)
    got = (q.to(dtype).double() @ k.to(dtype).double().mT) * 32**-0.5
    want = oracles.alibi_bias(at, at, heads)
    # c = slope √D keeps 16 bits, c · i 24; float16's smallest numbers lose more.
    bound = (
        want.abs() * 2**-16 + (start + 300) * 2**-22 + (1e-2 if dtype == torch.float16 else 1e-6)
    )
    assert ((got - want).abs() <= bound).all()


def test_maps_of_one_head_share_its_slope():
    q = torch.randn(1, 8, 5, 4)
    at = torch.arange(5)[None]
    columns, _ = alibi_columns(at, at, alibi_slopes(4), 0.5)
    joined = with_columns(q, columns)[..., 4:]
    assert torch.equal(joined[:, 0::2], columns)
    assert torch.equal(joined[:, 1::2], columns)


@pytest.mark.parametrize("centre", [0, 50, 8000])
def test_xpos_scores_match_their_oracle_whatever_the_centre(centre):
    q, k = torch.randn(2, 2, 3, 9, 16)
    at = torch.stack([torch.arange(9), torch.arange(9) * 50 + 100])
    frequency, _ = frequencies({"rope_type": "default", "rope_theta": 1e4}, 16, CPU)
    tables = xpos_tables(at, at, frequency, centre)
    got = rotate(q, tables[0]).double() @ rotate(k, tables[1]).double().mT
    want = oracles.xpos_scores(q, k, at, at, 1e4)
    past = torch.ones(9, 9).tril().bool()
    assert ((got - want)[..., past].abs() / want[..., past].abs().max()).max() < 1e-4


def test_xpos_neither_overflows_nor_vanishes_in_bfloat16_at_16k():
    at = torch.tensor([[0, 1, 8191, 8192, 16382, 16383]])
    frequency, _ = frequencies({"rope_type": "default", "rope_theta": 1e4}, 64, CPU)
    for cos, sin in xpos_tables(at, at, frequency, 8192):
        scale = (cos.bfloat16().float() ** 2 + sin.bfloat16().float() ** 2).sqrt()
        assert scale.isfinite().all()
        assert (scale > 1e-10).all()
        assert scale.max() < 1e10
