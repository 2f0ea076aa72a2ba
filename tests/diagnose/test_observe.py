"""A probed model is the plain model: same bits, same settings; tiles of weights are the oracle."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from clearhead import ClearheadError
from clearhead.diagnose import HiddenStatistics, RowMeans
from clearhead.ops import oracles
from clearhead.probe import ByTile, observe
from clearhead.probe import tiles as tiling
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import NAME
from clearhead.probe.tiles import AttentionTile
from clearhead.quantize import quantized, scheme

MODELS = ("transformer", "gpt2", "differential", "softmax1", "Llama", "GPT-2")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_equal(tiny, name, implementation):
    model = tiny.make(name)
    model.set_attn_implementation(implementation)
    ids = torch.stack(tiny.windows(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            plain = model(ids, **options).logits
            means, hidden = RowMeans(), HiddenStatistics()
            with observe(model, attention=[ByTile(weights=[means])], hidden=[hidden]):
                probed = model(ids, **options).logits
            assert torch.equal(plain, probed)
            for statistic in (means, hidden):
                lines = statistic.measures()
                assert {line["layer"] for line in lines if "layer" in line} == {0, 1, 2}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["differential", "Llama"])
def test_the_implementation_is_restored_after_an_error(tiny, name, implementation):
    model = tiny.make(name)
    model.set_attn_implementation(implementation)
    statistics = {"attention": [tiny.Calls()], "hidden": [HiddenStatistics()]}
    with pytest.raises(RuntimeError, match=NAME), observe(model, **statistics):
        raise RuntimeError(model.config._attn_implementation)
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with observe(model, **statistics):  # and another probe may enter
        pass


def test_autocast_outside_does_not_round_the_statistics(tiny):
    model = tiny.make("transformer")
    ids = torch.stack(tiny.windows(2))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(ids).logits
        means = RowMeans()
        with observe(model, attention=[ByTile(weights=[means])]):
            assert torch.equal(model(ids).logits, plain)
    floor = tiny.value(means.measures(), "chance_floor")
    assert floor == pytest.approx(tiny.harmonic(13), abs=1e-7)


@pytest.mark.parametrize(
    "within",
    [
        lambda tiny: observe(tiny.make("GPT-2"), attention=[tiny.Calls()]),
        lambda tiny: quantized(tiny.make("GPT-2"), scheme("kv8")),
    ],
)
def test_attention_is_replaced_in_one_model_at_a_time(tiny, within):
    model = tiny.make("Llama")
    with (
        observe(model, attention=[tiny.Calls()]),
        pytest.raises(ClearheadError, match="already being observed or quantised"),
        within(tiny),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_be_observed(tiny):
    bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=11))
    original = bloom.config._attn_implementation
    with (
        pytest.raises(ClearheadError, match="does not use transformers' AttentionInterface"),
        observe(bloom, attention=[tiny.Calls()], hidden=[tiny.Calls()]),
    ):
        pass
    assert bloom.config._attn_implementation == original
    assert not any(module._forward_hooks for module in bloom.modules())


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
