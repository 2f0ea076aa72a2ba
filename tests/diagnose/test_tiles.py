"""Tiles of attention weights against the float64 oracle."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility
from clearhead.probe import tiles as tiling
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.tiles import AttentionTile, ByTile

B, H, G, T, S, D = 2, 6, 3, 11, 11, 5


def _call(queries: int = T, **options: object) -> AttentionCall:
    q, k = torch.randn(B, H, queries, D) * 3, torch.randn(B, G, S, D)
    defaults = {"module": nn.Identity(), "layer": 0, "scale": D**-0.5}
    names = ("causal", "window", "key_mask", "segments")
    seen = {name: options.pop(name) for name in names if name in options}
    return AttentionCall(q=q, k=k, visibility=Visibility(**seen), **(defaults | options))


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
def test_tiles_are_the_oracle(monkeypatch, weights, options):
    monkeypatch.setattr(tiling, "TILE", weights)
    for queries in (T, 4):
        if getattr(options.get("sink"), "ndim", 1) == 3:
            options = {"sink": options["sink"][:, :, -queries:]}
        call = _call(queries, **options)
        expected = oracles.weights(call.q, call.k, **({"causal": True} | options))
        assert torch.allclose(_whole(call).double(), expected, atol=1e-6)


def test_null_weight_is_one_minus_the_row_sum():
    for shift in (0.0, 20.0, -40.0):  # at 20 the difference itself would be all rounding
        call = _call(sink=0.0, bias=torch.full((1, H, T, S), shift))
        scores = call.q.double() @ call.k.double().repeat_interleave(2, 1).mT * call.scale + shift
        scores = scores.masked_fill(torch.ones(T, S).triu(1).bool(), -torch.inf)
        expected = 1 / (1 + scores.exp().sum(-1))
        null = torch.cat([tile.maps[0].null for tile in _tiles(call)], 2)
        assert torch.allclose(null.double(), expected, rtol=1e-4)


def test_bool_and_additive_masks_are_the_causal_mask():
    visible = torch.ones(1, 1, T, S).tril().bool()
    call = _call(causal=False, mask=visible)
    least = torch.finfo(torch.float32).min
    expected = oracles.weights(call.q, call.k)
    for mask in (
        visible,
        torch.zeros(1, 1, T, S).masked_fill(~visible, least),
        torch.zeros(1, 1, T, S).masked_fill(~visible, -torch.inf),
    ):
        options = {"module": call.module, "layer": 0, "scale": call.scale}
        options["visibility"] = Visibility(causal=False)
        masked = AttentionCall(q=call.q, k=call.k, mask=mask, **options)
        assert torch.allclose(_whole(masked).double(), expected, atol=1e-6)
        assert all(
            bool((tile.visible == visible[:, :, tile.start :]).all()) for tile in _tiles(masked)
        )


def test_a_tile_holds_a_bounded_number_of_weights(monkeypatch):
    monkeypatch.setattr(tiling, "TILE", 5 * B * H * S)
    assert [tile.maps[0].weights.shape[2] for tile in _tiles(_call())] == [5, 5, 1]
    # Causal rows see no key behind them, and none is computed.
    assert [tile.maps[0].weights.shape[3] for tile in _tiles(_call())] == [5, 10, 11]
