"""Schemes by name."""

import pytest

from clearhead import ClearheadError
from clearhead.quantize import every, scheme
from clearhead.quantize.schemes import Rounding


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
