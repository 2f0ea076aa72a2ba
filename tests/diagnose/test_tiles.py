"""Tiles of attention weights against the float64 oracle."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from clearhead.ops import oracles
from clearhead.probe import tiles as tiling
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.tiles import AttentionTile, ByTile

B, H, G, S, D = SIZES = 2, 6, 3, 11, 5
T = S


def _whole(call: AttentionCall) -> torch.Tensor:
    out = torch.zeros(*call.q.shape[:3], call.k.shape[2])
    for tile in _tiles(call):
        weights = tile.maps[0].weights
        _, _, rows, keys = weights.shape
        out[:, :, tile.start : tile.start + rows, :keys] = weights
    return out


def _tiles(call: AttentionCall) -> list[AttentionTile]:
    tiles: list[AttentionTile] = []
    keep = SimpleNamespace(observe=lambda call, tile: tiles.append(tile))
    ByTile(weights=[keep]).observe(call)
    return tiles


@pytest.mark.parametrize("weights", [1 << 22, 3 * B * H * S, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"sink": 0.0},
        {"sink": torch.linspace(-2, 3, H)},
        {"sink": torch.linspace(-2, 3, B * H * S).view(B, H, S)},
        {"window": 3},
        {"key_mask": torch.arange(S).expand(B, S) >= torch.tensor([[0], [4]])},
        {"segments": (torch.arange(S) // 4).expand(B, S)},
    ],
)
def test_tiles_are_the_oracle(tiny, monkeypatch, weights, options):
    monkeypatch.setattr(tiling, "TILE", weights)
    for queries in (T, 4):
        if getattr(options.get("sink"), "ndim", 1) == 3:
            options = {"sink": options["sink"][:, :, -queries:]}
        call = tiny.call(*SIZES, queries, scale=D**-0.5, **options)
        expected = oracles.weights(call.q, call.k, **({"causal": True} | options))
        assert torch.allclose(_whole(call).double(), expected, atol=1e-6)


def test_bool_and_additive_masks_are_the_causal_mask(tiny):
    visible = torch.ones(1, 1, T, S).tril().bool()
    call = tiny.call(*SIZES, causal=False, scale=D**-0.5)
    least = torch.finfo(torch.float32).min
    expected = oracles.weights(call.q, call.k)
    for mask in (
        visible,
        torch.zeros(1, 1, T, S).masked_fill(~visible, least),
        torch.zeros(1, 1, T, S).masked_fill(~visible, -torch.inf),
    ):
        masked = replace(call, mask=mask)
        assert torch.allclose(_whole(masked).double(), expected, atol=1e-6)
        assert all(
            bool((tile.visible == visible[:, :, tile.start :]).all()) for tile in _tiles(masked)
        )


def test_a_tile_holds_a_bounded_number_of_weights(tiny, monkeypatch):
    monkeypatch.setattr(tiling, "TILE", 5 * B * H * S)
    assert [tile.maps[0].weights.shape[2] for tile in _tiles(tiny.call(*SIZES))] == [5, 5, 1]
    # Causal rows see no key behind them, and none is computed.
    assert [tile.maps[0].weights.shape[3] for tile in _tiles(tiny.call(*SIZES))] == [5, 10, 11]
