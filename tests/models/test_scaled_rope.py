"""Rope scaling of models of transformers: through their own parameters, weights shared."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import with_rope_scaling
from clearhead.ops import ntk_theta

from .space import WHOLE

SHAPE = WHOLE | {"max_position_embeddings": 16}


def _llama(**rope) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **rope)).eval()


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
        ("dynamic", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}),
        ("ntk", {"rope_type": "default", "rope_theta": ntk_theta(10_000.0, 4.0, 8)}),
        (
            "yarn",
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ],
)
def test_is_a_model_made_with_these_parameters(kind, parameters):
    model = _llama()
    other = with_rope_scaling(model, kind, factor=4.0)
    made = _llama(rope_parameters=parameters)
    made.load_state_dict(model.state_dict())
    ids = torch.randint(0, 61, (2, 40))
    with torch.no_grad():
        plain = model(ids).logits
        torch.testing.assert_close(other(ids).logits, made(ids).logits)
        assert not torch.allclose(other(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)  # it stays as it is
    for mine, shared in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.data_ptr() == shared.data_ptr()


def test_only_the_rotated_part_of_a_head_counts_for_ntk():
    config = GPTNeoXConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    config.rope_parameters["partial_rotary_factor"] = 0.5
    other = with_rope_scaling(GPTNeoXForCausalLM(config), "ntk", factor=2.0)
    assert other.config.rope_parameters["rope_theta"] == pytest.approx(ntk_theta(1e4, 2.0, 4))


@pytest.mark.parametrize(
    ("make", "kind", "factor", "message"),
    [
        (_llama, "yran", 2, "did you mean yarn"),
        (_llama, "linear", 1, "factor is 1: a rope scaling takes one above 1"),
        (_llama, "dynamic-causal", 2, "did you mean dynamic"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "ntk", 2, "has none"),
        (
            lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1}),
            "ntk",
            2,
            r"frequencies are 'linear' already",
        ),
        (lambda: ClearheadForCausalLM(preset("alibi", **SHAPE)), "ntk", 2, "has none"),
        (lambda: ClearheadForCausalLM(preset("xpos", **SHAPE)), "linear", 2, "not defined for it"),
    ],
)
def test_refuses(make, kind, factor, message):
    with pytest.raises(ClearheadError, match=message):
        with_rope_scaling(make(), kind, factor=factor)
