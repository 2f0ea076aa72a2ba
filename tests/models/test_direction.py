"""Bidirectional models: every token sees the whole text, and nothing else changes."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import ClearheadModel, plan

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "direction": "bidirectional",
}
NAMES = [
    *("transformer", "gpt2", "differential", "differential-v2"),
    *("coca", "coca-strict", "coca-slack", "softmax1", "sink"),
]


def _model(name: str, **overrides: object) -> ClearheadModel:
    return ClearheadModel(preset(name, **SHAPE | overrides)).eval()


def _ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 61, (batch, length))


def _run(model: ClearheadModel, ids: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **options).last_hidden_state


@pytest.mark.parametrize("name", NAMES)
def test_the_first_token_sees_the_last_and_causally_it_does_not(name):
    ids = _ids()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    model = _model(name)
    assert (_run(model, ids) - _run(model, other))[:, 0].abs().max() > 1e-4
    causal = _model(name, direction="causal")
    causal.load_state_dict(model.state_dict())
    assert torch.equal(_run(causal, ids)[:, 0], _run(causal, other)[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_eager_is_the_oracle(name):
    model, ids = _model(name), _ids()
    fast = _run(model, ids)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    assert torch.allclose(out.last_hidden_state, fast, atol=2e-5)
    assert (out.attentions[0][:, :, 0, 1:] != 0).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, ids, padding = _model(name), _ids(1, 9), _ids(1, 4)
    mask = torch.ones(1, 13, dtype=torch.long)
    kept = slice(4, None) if side == "left" else slice(0, 9)
    mask[:, : kept.start] = 0
    mask[:, kept.stop or 13 :] = 0
    padded = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    got = _run(model, padded, attention_mask=mask)[:, kept]
    assert torch.allclose(got, _run(model, ids), atol=2e-5)


def test_rotary_scaling_reaches_beyond_the_trained_length():
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = _model("coca", rope_parameters=rope, max_position_embeddings=8)
    plain = _model("coca", max_position_embeddings=8)
    plain.load_state_dict(model.state_dict())
    short, long = _ids(length=8), _ids(length=11)
    assert torch.allclose(_run(model, short), _run(plain, short), atol=1e-6)
    assert (_run(model, long) - _run(plain, long)).abs().max() > 1e-3


def test_what_needs_a_direction_is_refused():
    with pytest.raises(ClearheadError, match="build ClearheadModel"):
        ClearheadForCausalLM(preset("transformer", **SHAPE))
    with pytest.raises(ClearheadError, match="needs direction='causal'"):
        _model("transformer")(_ids(), past_key_values=DynamicCache())
    assert _model("transformer")(_ids(), use_cache=True).past_key_values is None
    refused = {
        "columns": {"position": "alibi"},
        "grow towards later keys": {"position": "xpos"},
        "bag of tokens": {"position": "none"},
        "looks back only": {"rope_parameters": {"rope_type": "dynamic-causal", "factor": 2}},
    }
    for message, keys in refused.items():
        with pytest.raises(ClearheadError, match=message):
            ClearheadConfig(direction="bidirectional", **keys)


def test_a_plan_counts_twice_the_scores():
    causal, both = (
        plan(preset("transformer", direction=direction), length=101)
        for direction in ("causal", "bidirectional")
    )
    assert both.parameters == causal.parameters
    assert both.forward_flops - causal.forward_flops == 4 * 4 * 192 * 50
