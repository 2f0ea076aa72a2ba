"""Sliding windows and hybrid layers: caches that drop keys, and what the layers cost."""

import pytest
import torch
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadForCausalLM
from clearhead.models import plan
from clearhead.ops import oracles

from . import space

SHAPE = space.SHAPE | {"num_hidden_layers": 4}
HYBRID = {"sliding_window": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
POINTS = {
    "transformer": {},
    "sinks": {"normalizer": "sink"},
    "differential": {"maps": "differential", "normalizer": "softmax1"},
    "differential-v2": {"maps": "differential-v2"},
    "coca": {"scores": "coca"},
    "alibi": {"position": "alibi"},
    "forget": {"position": "forget", "normalizer": "sink"},
    "xpos": {"position": "xpos"},
    "sas": {"shaping": "shaped", "query_range": 0.3, "normalizer": "softmax1"},
    "no position in full layers": {"layer_overrides": [{}, {}, {}, {"position": "none"}]},
    "forget in windows": {"layer_overrides": [{"position": "forget"}] * 3 + [{}]},
    "alibi in windows": {"layer_overrides": [{"position": "alibi"}] * 3 + [{}]},
    "differential in full layers": {"layer_overrides": [{}, {"maps": "differential"}]},
    "coca in some layers": {"layer_overrides": [{"scores": "coca"}, {}]},
    "shaped in some layers": {"layer_overrides": [{"shaping": "shaped"}, {}], "query_range": 0.3},
}


def _model(name: str, **more: object) -> ClearheadForCausalLM:
    return ClearheadForCausalLM(ClearheadConfig(**SHAPE | HYBRID | POINTS[name] | more)).eval()


_ids = space.drawing(15, 31)


@pytest.mark.parametrize("name", POINTS)
def test_caches_that_drop_keys_give_the_full_forward(name):
    """By steps and chunks, below the window and beyond it; rows padded on the left."""
    sizes = ([15], [2, 1, 1, 1, 1, 1, 3, 5], [6, 9], [5, 1, 1, 4, 1, 1, 1, 1])
    space.decodes(_model(name), sizes)


@pytest.mark.parametrize("name", ["coca", "no position in full layers"])
def test_generation_with_either_cache_is_that_without(name):
    model, ids = _model(name), _ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, use_cache=False, **options).tolist()
    for kind in ("dynamic", "static"):
        assert model.generate(ids, cache_implementation=kind, **options).tolist() == want


@pytest.mark.parametrize("name", POINTS)
def test_eager_is_the_oracle_and_windows_hide(name):
    model, ids = _model(name, max_position_embeddings=24).double(), _ids()
    space.eager_agrees(model, ids)
    with torch.no_grad():
        out = model(ids, use_cache=False, output_attentions=True)
    seen = oracles.visible(15, 15, causal=True, window=4)[0, 0]
    assert (out.attentions[0][..., ~seen] == 0).all()
    assert (out.attentions[3][..., 14, 0] != 0).any()


def test_a_plan_counts_what_is_seen_and_what_is_held():
    model = _model("transformer")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(_ids(1), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    hybrid, full = (
        plan(ClearheadConfig(**SHAPE | keys), length=15) for keys in (HYBRID, {"head_dim": 8})
    )
    assert hybrid.cache_bytes * 15 == 2 * held
    assert hybrid.cache_bytes == full.cache_bytes * (15 + 3 * 3) / 60
    # 15 tokens see 120 keys, by windows of 4 only 54.
    assert full.forward_flops - hybrid.forward_flops == pytest.approx(3 * 4 * 32 * (120 - 54) / 15)
    assert hybrid.parameters == full.parameters


def test_layers_are_described_as_they_are(tmp_path):
    model = _model("no position in full layers")
    model.save_pretrained(tmp_path)
    config = ClearheadForCausalLM.from_pretrained(tmp_path).config
    assert [config.layer(i).sliding_window for i in range(4)] == [4, 4, 4, None]
    assert [config.layer(i).position for i in range(4)] == ["rope"] * 3 + ["none"]
    assert config.layer_types == HYBRID["layer_types"]
    twelve = ClearheadConfig(**SHAPE | HYBRID | {"num_hidden_layers": 12})
    assert twelve.layer_types == HYBRID["layer_types"] * 3
