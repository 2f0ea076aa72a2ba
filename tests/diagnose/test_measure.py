"""Attention and hidden states in one pass, as `compare` measures them."""

import math

import pytest
import torch

from clearhead import ClearheadError
from clearhead.diagnose import HiddenStatistics, RowMeans
from clearhead.probe import ByTile
from clearhead.probe import measure as measure_any


def measure(model, windows, *, batch_size):
    statistics = {"attention": [ByTile(weights=[RowMeans()])], "hidden": [HiddenStatistics()]}
    return measure_any(model, windows, batch_size=batch_size, **statistics)


def test_names_and_values(tiny):
    lines = measure(tiny.make("softmax1"), tiny.windows(), batch_size=5)
    assert all(math.isfinite(line["value"]) for line in lines)
    whole = [line for line in lines if "layer" not in line]
    assert [(line["metric"], line.get("map"), line.get("tokens")) for line in whole] == [
        ("first_token_argmax_share", "softmax", None),
        ("first_token_mass", "softmax", None),
        ("null_mass", "softmax", None),
        ("entropy", "softmax", None),
        ("chance_floor", None, None),
        ("entropy_ceiling", None, None),
        ("kurtosis", None, "first"),
        ("largest_activation", None, "first"),
        ("kurtosis", None, "rest"),
        ("largest_activation", None, "rest"),
        ("kurtosis_excess", None, None),
    ]


def test_mode_and_implementation_are_left_as_they_were(tiny):
    model = tiny.make("GPT-2")
    model.train()
    model.transformer.h[1].eval()  # dropout would make each measurement another
    before = [module.training for module in model.modules()]
    first, second = (measure(model, tiny.windows(2), batch_size=1) for _ in range(2))
    assert [line.keys() for line in first] == [line.keys() for line in second]
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ClearheadError):
        measure(model, [torch.zeros(3, 3, dtype=torch.long)], batch_size=1)
    assert [module.training for module in model.modules()] == before


def test_refuses(tiny):
    model = tiny.make("GPT-2")
    cases = [
        ([], "no windows"),
        ([torch.zeros(33, dtype=torch.long)], "32 learned positions, too few for 33 tokens"),
        ([torch.full((3,), 61)], "token ids from 61 to 61, and the model knows 0 to 60"),
        ([torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long)], "of one length"),
    ]
    for windows, message in cases:
        with pytest.raises(ClearheadError, match=message):
            measure(model, windows, batch_size=2)
