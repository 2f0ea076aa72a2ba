"""Quantisers against values by hand, and against the formulas in float64, number by number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import ClearheadError
from clearhead.quantize import every, scheme
from clearhead.quantize.quantizers import absmax, fp8, grouped, integers, mxfp4, zeropoint
from clearhead.quantize.schemes import Rounding


# Python's round, too, rounds halves to even.
def _absmax_oracle(row: list[float], bits: int) -> list[float]:
    levels = 2 ** (bits - 1) - 1
    a = max(map(abs, row))
    return [round(x / a * levels) * a / levels if a else 0.0 for x in row]


def zeropoint_oracle(row: list[float], bits: int, kept: float = 1.0) -> list[float]:
    levels = 2**bits - 1
    low, high = min(0.0, *row) * kept, max(0.0, *row) * kept
    if low == high:
        return [0.0 for _ in row]
    zero = round(-low / (high - low) * levels)
    codes = [round(x / (high - low) * levels) + zero for x in row]
    return [(min(max(c, 0), levels) - zero) * (high - low) / levels for c in codes]


ORACLES = {"absmax": (absmax, _absmax_oracle), "zeropoint": (zeropoint, zeropoint_oracle)}


# All e4m3 numbers from 0 on, in the order of their codes: subnormal ones first, no infinity.
E4M3 = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def fp8_oracle(row: list[float]) -> list[float]:
    """The nearest e4m3 number; of two the one with the even code."""
    a = max(map(abs, row))

    def near(x: float) -> float:
        size = abs(x) / a * 448 if a else 0.0
        code = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - size), i % 2))
        return math.copysign(E4M3[code] * a / 448, x)

    return [near(x) for x in row]


def test_fp8_by_its_table():
    assert E4M3[-1] == 448
    row = [448.0, -447.0, 240.1, 18.0, 17.0, 19.0, 0.3, 2**-9, 2**-10, 3 * 2**-10, -1e-4, 0.0]
    found = fp8(torch.tensor(row, dtype=torch.float64), (0,)).tolist()
    assert found == pytest.approx(fp8_oracle(row), rel=1e-12)
    # A static range: numbers beyond it become its end.
    assert fp8(torch.tensor([3.0, -1.0]), (0,), top=torch.tensor(2.0)).tolist() == [2.0, -1.0]


def test_mxfp4_by_hand():
    # The largest is in [4, 8) already: halves go to the even mantissa, and 6 is the most there is.
    x = torch.tensor([[7.9, 5.0, 3.5, 2.5, 1.25, 0.75, 0.25, -0.3, 0.0]])
    assert mxfp4(x, (1,)).tolist() == [[6.0, 4.0, 4.0, 2.0, 1.0, 1.0, 0.0, -0.5, 0.0]]
    # A power of two is shared: all of it scales, and blocks of zeros stay zero.
    assert mxfp4(x * 2.0**-9, (1,)).tolist() == (mxfp4(x, (1,)) * 2.0**-9).tolist()
    assert mxfp4(torch.zeros(2, 4), (1,)).tolist() == [[0.0] * 4] * 2
    with pytest.raises(ClearheadError, match="1 NaN"):
        mxfp4(torch.tensor([1.0, math.nan]), (0,))


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 16),
    rows=st.integers(1, 5),
    width=st.integers(1, 9),
    size=st.sampled_from([1e-300, 1e-30, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_against_the_oracle_in_float64(name, bits, rows, width, size, seed):
    quantizer, oracle = ORACLES[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, dtype=torch.float64, generator=generator) * size
    expected = torch.tensor([oracle(row, bits) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(quantizer(x, bits, (1,)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ORACLES)
def test_all_zero_and_all_equal_rows(name):
    quantizer, _ = ORACLES[name]
    x = torch.tensor([[0.0] * 5, [3.7] * 5, [-1e-44] * 5, [2e38] * 5])
    for bits in (2, 5, 8, 16):
        assert torch.equal(quantizer(x, bits, (1,)), x)


@pytest.mark.parametrize("name", ORACLES)
def test_numbers_that_are_none_are_reported(name):
    quantizer, _ = ORACLES[name]
    x = torch.randn(3, 4)
    x[0, 1], x[2, 2], x[2, 3] = math.nan, math.inf, -math.inf
    with pytest.raises(ClearheadError, match=r"1 NaN and 2 infinite of 12 numbers.*\[3, 4\]"):
        quantizer(x, 8, (1,))
    with pytest.raises(ClearheadError, match="or too large a range"):
        zeropoint(torch.tensor([3e38, -3e38]), 8, (0,))


def test_a_static_scale_cuts_off():
    x = torch.tensor([[1.0, 10.0], [-3.0, -10.0], [0.4, 2.6]])
    found = absmax(x, 3, (0, 1), top=torch.tensor([1.5, 0.0]))
    # Steps of 0.5 up to 1.5; a channel that was never anything else stays zero.
    assert found.tolist() == [[1.0, 0.0], [-1.5, 0.0], [0.5, 0.0]]
    # As kernels compute, numbers below have one more code.
    found = integers(torch.tensor([-3.0, -1.2, 4.0]), 3, (0,), top=torch.tensor(1.5))
    assert found.tolist() == [-2.0, -1.0, 1.5]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_are_absmax_but_for_rounding(bits):
    x = torch.randn(5, 9, dtype=torch.float64)
    x[2] = 0
    found, wanted = integers(x, bits, (1,)), absmax(x, bits, (1,))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    # Other levels: 2 / 3.6 is the scale, and 2 is code 3.
    found = integers(torch.tensor([2.0, -2.0, 0.5]), 3, (0,), levels=3.6)
    torch.testing.assert_close(found, torch.tensor([3.0, -4.0, 1.0]) * 2 / 3.6)


@pytest.mark.parametrize(("width", "group"), [(7, 3), (6, 3), (5, 2), (1, 4)])
def test_groups_of_odd_sizes(width, group):
    x = torch.randn(3, width)
    for quantizer in (absmax, zeropoint):
        found = quantizer(grouped(x, group), 4, (2,)).flatten(1)[:, :width]
        for start in range(0, width, group):
            part = slice(start, start + group)
            torch.testing.assert_close(found[:, part], quantizer(x[:, part], 4, (1,)))


def _both(bits, inputs, scales, quantizer="absmax"):
    pairs = zip((bits, inputs), scales, strict=True)
    return [Rounding(bits=n, scale=scale, quantizer=quantizer) for n, scale in pairs]


def _cached(bits, **more):
    return Rounding(**{"bits": bits, "scale": "token", "quantizer": "zeropoint", **more})


@pytest.mark.parametrize(
    ("name", "family", "bits", "rounded"),
    [
        ("w8a8-coarse", "wa-coarse", 8, _both(8, 8, ("tensor", "tensor"))),
        ("w8a6-moderate", "wa-moderate", None, _both(8, 6, ("channel", "tensor"))),
        ("w8a8-fine", "wa-fine", 8, _both(8, 8, ("channel", "channel"))),
        ("w4a16-token", "wa-token", None, _both(4, 16, ("channel", "token"))),
        ("w8a8-static", "wa-static", 8, _both(8, 8, ("channel", "static"), "integers")),
        ("fp8-token", "fp8-token", 8, _both(8, 8, ("channel", "token"), "fp8")),
        ("w4-tensor", "w-tensor", 4,
            [Rounding(bits=4, scale="tensor", quantizer="zeropoint"), None]),
        ("w4-group64", "w-group64", 4,
            [Rounding(bits=4, scale="group", quantizer="zeropoint", group=64), None]),
        ("w4a16-group64", "wa16-group64", 4,
            [Rounding(bits=4, scale="group", quantizer="integers", group=64), None]),
        ("mxfp4", "mxfp4", 4, [Rounding(bits=4, scale="group", quantizer="mxfp4", group=32), None]),
        ("a8-token", "a-token", 8, [None, Rounding(bits=8, scale="token", quantizer="zeropoint")]),
        ("a4-group32-clip95", "a-group32-clip95", 4,
            [None, Rounding(bits=4, scale="group", quantizer="zeropoint", group=32, kept=0.95)]),
    ],
)  # fmt: skip
def test_weights_and_activations(name, family, bits, rounded):
    found = scheme(name)
    assert [found.weights, found.activations] == rounded
    assert (found.family, found.bits, found.rotated) == (family, bits, False)
    assert found.calibrated == (name in ("w8a8-fine", "w8a8-static"))
    assert not found.attends


@pytest.mark.parametrize(
    ("name", "family", "how"),
    [
        ("kv8", "kv-token", _cached(8)),
        ("kv-fp8-tensor", "kv-fp8-tensor", _cached(8, scale="tensor", quantizer="fp8")),
        ("kv4-prerope", "kv-token-prerope", _cached(4, prerope=True)),
        (
            "hadamard-kv3-channel-prerope-keep2",
            "hadamard-kv-channel-prerope-keep2",
            _cached(3, scale="channel", prerope=True, keep=2, rotated=True),
        ),
    ],
)
def test_keys_and_values(name, family, how):
    found = scheme(name)
    assert found.keys_values == how
    assert (found.family, found.bits, found.rotated) == (family, how.bits, False)


def test_schemes_together():
    found = scheme("hadamard-w8a8-token+kv4-keep1+logits8-row")
    assert found.weights == scheme("w8a8-token").weights
    assert found.activations == scheme("w8a8-token").activations
    assert found.keys_values == _cached(4, keep=1)
    assert found.logits == Rounding(bits=8, scale="row")
    assert found.rotated
    assert found.bits is None
    assert found.family == "hadamard-wa-token+kv-token-keep1+logits-row"
    assert scheme("w8-channel+kv8").bits == 8
    assert scheme("w4-group64+a8-token").bits is None


def test_all_names_schemes():
    assert [scheme(name).name for name in every()] == every()
    assert len(every()) == len({*every()}) == 4 * 3 + 2 * 4 + 3 * 3
    for name in ("w8a8-coarse", "w3-channel", "w4-group", "logits4-row"):
        assert name in every()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w8a8-corse", "did you mean w8a8-coarse"),
        ("w4a8-group64", "did you mean w4-group64 or w4a16-group64"),
        ("mxfp5", "did you mean mxfp4"),
        ("hadamard-logits8-row", "unknown scheme 'hadamard-logits8-row'"),
        ("hadamard-hadamard-kv4", "did you mean hadamard-kv4"),
        ("a17-token", "17 bits: choose 2 to 16"),
        ("a4-token-clip0", "unknown scheme"),
        ("w4-channel-clip90", "unknown scheme"),
        ("hadamard-a4-token", "did you mean"),
        ("w8a8-token+a8-token", "rounds activations twice"),
        ("kv4-chanel", "did you mean kv4-channel"),
        ("kv4+kv8", "rounds keys and values twice"),
        ("kv8+", "unknown scheme ''"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ClearheadError, match=message):
        scheme(name)
