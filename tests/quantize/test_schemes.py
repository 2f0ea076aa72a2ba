"""Schemes by name."""

import pytest

from clearhead import ClearheadError
from clearhead.quantize import every, scheme
from clearhead.quantize.schemes import FAMILIES, Activations, KeysValues, Logits, Weights


def test_the_papers_granularities():
    assert scheme("w8a8-coarse").weights == Weights(bits=8, quantizer="absmax", scale="tensor")
    assert scheme("w8a8-coarse").activations == Activations(bits=8, scale="tensor")
    assert scheme("w8a8-moderate").weights == Weights(bits=8, quantizer="absmax", scale="channel")
    assert scheme("w8a8-moderate").activations == Activations(bits=8, scale="tensor")
    assert scheme("w8a8-fine").activations == Activations(bits=8, scale="channel")
    assert scheme("w8a8-token").activations == Activations(bits=8, scale="token")
    found = scheme("w4-channel")
    assert found.weights == Weights(bits=4, quantizer="zeropoint", scale="channel")
    assert found.activations is None
    assert found.logits is None
    assert scheme("w4-group64").weights == Weights(
        bits=4, quantizer="zeropoint", scale="group", group=64
    )
    assert scheme("logits6-head").logits == Logits(bits=6, scale="head")
    assert scheme("logits6-head").weights is None


def test_weights_alone_by_absmax():
    found = scheme("w4a16-group64")
    assert found.weights == Weights(bits=4, quantizer="integers", scale="group", group=64)
    assert found.activations is None
    assert (found.family, found.bits) == ("wa16-group64", 4)
    assert scheme("w8a16-channel").weights.scale == "channel"


def test_activations_alone():
    found = scheme("a4-group32-clip95")
    how = Activations(bits=4, scale="group", quantizer="zeropoint", group=32, kept=0.95)
    assert found.activations == how
    assert found.weights is None
    assert (found.family, found.bits) == ("a-group32-clip95", 4)
    assert scheme("a8-token").activations == Activations(
        bits=8, scale="token", quantizer="zeropoint"
    )
    assert scheme("w4-group64+a8-token").bits is None


def test_bits_of_weights_and_activations_may_differ():
    found = scheme("w4a16-token")
    assert found.weights is not None
    assert found.activations is not None
    assert (found.weights.bits, found.activations.bits) == (4, 16)
    assert found.bits is None  # so it has no place on an axis of bits


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("kv8", KeysValues(bits=8)),
        ("kv-fp8-tensor", KeysValues(bits=None, scale="tensor")),
        ("kv4-prerope", KeysValues(bits=4, prerope=True)),
        (
            "hadamard-kv3-channel-prerope-keep2",
            KeysValues(bits=3, scale="channel", prerope=True, keep=2, rotated=True),
        ),
    ],
)
def test_keys_and_values(name, how):
    found = scheme(name)
    assert found.keys_values == how
    assert not found.rotated
    assert found.bits == (how.bits or 8)


def test_schemes_together():
    found = scheme("hadamard-w8a8-token+kv4-keep1+logits8-row")
    assert found.weights == scheme("w8a8-token").weights
    assert found.activations == scheme("w8a8-token").activations
    assert found.keys_values == KeysValues(bits=4, keep=1)
    assert found.logits == Logits(bits=8, scale="row")
    assert found.rotated
    assert found.bits is None
    assert scheme("w8-channel+kv8").bits == 8


def test_all_draws_every_family():
    schemes = [scheme(name) for name in every()]
    assert [found.name for found in schemes] == every()
    assert {found.family for found in schemes} == set(FAMILIES)
    assert all(found.bits in FAMILIES[found.family] for found in schemes)
    for name in ("w8a8-coarse", "w4-channel", "w4-group", "logits4-row"):
        assert name in every()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w1-channel", "1 bits: choose 2 to 16"),
        ("w8a17-token", "17 bits: choose 2 to 16"),
        ("logits0-row", "0 bits: choose 2 to 16"),
        ("w8a8-corse", "did you mean coarse"),
        ("w4-head", "unknown granularity 'head'"),
        ("logits4-channel", "unknown granularity 'channel'"),
        ("w4-chanel", "did you mean channel"),
        ("w4a8-group64", "unknown granularity 'group'"),
        ("w4a16-token8", "only 'group' takes a number"),
        ("w4-channel8", "only 'group' takes a number"),
        ("w4-group1", "2 inputs or more"),
        ("int8", "unknown scheme 'int8'"),
        ("mxfp5", "did you mean mxfp4"),
        ("hadamard-logits8-row", "turns the inputs of linear layers"),
        ("hadamard-hadamard-kv4", "turns the inputs of linear layers"),
        ("a17-token", "17 bits: choose 2 to 16"),
        ("a4-tensor", "unknown granularity 'tensor'"),
        ("a4-token32", "only 'group' takes a number"),
        ("a4-group1", "2 inputs or more"),
        ("a4-token-clip0", "unknown scheme"),
        ("w4-channel-clip90", "unknown scheme"),
        ("hadamard-a4-token", "turns the inputs of linear layers with their weights"),
        ("w8a8-token+a8-token", "rounds activations twice"),
        ("kv1", "1 bits: choose 2 to 16"),
        ("kv4-chanel", "did you mean channel"),
        ("kv4-keep", "unknown scheme"),
        ("fp8-coarse", "unknown granularity 'coarse'"),
        ("kv4+kv8", "rounds keys and values twice"),
        ("w8a8-token+w4-channel", "rounds weights twice"),
        ("hadamard-hadamard-mxfp4", "turns the inputs of linear layers"),
        ("", "unknown scheme ''"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ClearheadError, match=message):
        scheme(name)
