"""Packing keeps a weight within a step, and a page small."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from clearhead.view import Observation
from clearhead.view.trace import SIGNED_STEPS, STEPS, pack_map

from . import conftest as helpers


@settings(deadline=None)
@given(
    some.integers(1, 9),
    some.booleans(),
    some.booleans(),
    some.booleans(),
    some.integers(0, 2**32 - 1),
    some.sampled_from([1e-6, 1.0, 300.0]),
)
def test_a_round_trip_stays_within_a_step(length, causal, signed, with_null, seed, size):
    source = torch.Generator().manual_seed(seed)
    weights = torch.rand(length, length, generator=source) ** 3 * size
    null = torch.rand(length, generator=source) * size if with_null else None
    if causal:
        weights = weights.tril()
    if signed:
        weights[-1, 0] = -weights[-1, 0] - size / 2
    packed = pack_map(weights, null, causal=causal)
    assert packed["steps"] == (SIGNED_STEPS if signed else STEPS)
    assert 16 <= packed["steps"] + packed["centre"] + 1 <= 32
    chunk = packed.pop("data")
    found = Observation(
        model={
            "maps": {"0.0": {"softmax": {**packed, "chunk": 0, "null": with_null}}},
            "tokens": [""] * length,
            "causal": causal,
        },
        chunks=[chunk],
    )
    again, null_again = helpers.map_of(found, 0, 0, "softmax")
    bound = helpers.step(found, 0, 0, "softmax", weights) + 1e-5 * size
    assert bool(((again - weights).abs() <= bound).all())
    if null is not None:
        bound = helpers.step(found, 0, 0, "softmax", null) + 1e-5 * size
        assert bool(((null_again - null).abs() <= bound).all())
