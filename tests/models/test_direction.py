"""Bidirectional models: every token sees the whole text, and nothing else changes."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import ClearheadModel, plan

from . import space

SHAPE = space.WHOLE | {"direction": "bidirectional"}
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


def test_without_a_position_a_text_is_a_bag_of_tokens():
    model, ids = _model("transformer", position="none"), _ids(length=9)
    order = torch.randperm(9)
    assert torch.allclose(_run(model, ids[:, order]), _run(model, ids)[:, order], atol=2e-5)


def test_what_needs_a_direction_is_refused():
    with pytest.raises(ClearheadError, match="build ClearheadForMaskedLM"):
        ClearheadForCausalLM(preset("transformer", **SHAPE))
    with pytest.raises(ClearheadError, match="needs direction='causal'"):
        _model("transformer")(_ids(), past_key_values=DynamicCache())
    assert _model("transformer")(_ids(), use_cache=True).past_key_values is None


def test_a_plan_counts_twice_the_scores():
    causal, both = (
        plan(preset("transformer", direction=direction), length=101)
        for direction in ("causal", "bidirectional")
    )
    assert both.parameters == causal.parameters
    assert both.forward_flops - causal.forward_flops == 4 * 4 * 192 * 50
