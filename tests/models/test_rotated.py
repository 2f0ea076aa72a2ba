"""Models in another basis: the same function, spread over all channels."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
from clearhead.models.rotated import rotated
from clearhead.nn.norms import RMSNorm

from . import space

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys shared": {"num_key_value_heads": 1},
    "biases": {"bias": True},
    "one gain a norm": {"norm": "rmsnorm-single"},
    "head of its own": {"tie_word_embeddings": False},
    "parallel": {"order": "parallel"},
    "V2": {"maps": "differential-v2"},
    "xsa": {"epilogue": "xsa"},
    "shaped": {"shaping": "shaped", "attention_skip": "none"},
    "softmax-1, alibi": {"normalizer": "softmax1", "position": "alibi"},
    "forget": {"position": "forget"},
    "norms of queries and keys": {"qk_norm": "rmsnorm"},
    "plain MLP, turned": {"mlp": "gelu", "mlp_rotation": "hadamard"},
}


def _model(**keys: Any) -> ClearheadForCausalLM:
    """A model in float64 whose weights and gains are all different."""
    torch.manual_seed(0)
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | keys)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _logits(model: ClearheadForCausalLM) -> torch.Tensor:
    ids = torch.arange(22).view(2, 11)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("parts", [("residual",), ("values",), ("residual", "values")], ids=str)
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_a_rotated_model_is_the_same_function_in_other_weights(keys, parts):
    model = _model(**keys)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = rotated(model, parts)
    torch.testing.assert_close(_logits(made), _logits(model), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    own = made.state_dict()
    turned = {"residual": "self_attn.q_proj.weight", "values": "self_attn.v_proj.weight"}
    for part in parts:
        name = f"model.layers.1.{turned[part]}"
        assert not torch.allclose(own[name], before[name])


def test_each_seed_draws_a_rotation_of_its_own():
    model = _model()
    first, again, other = (rotated(model, ("residual",), seed=seed) for seed in (0, 0, 1))
    weights = [one.model.embed_tokens.weight for one in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])
    torch.testing.assert_close(_logits(other), _logits(model), rtol=1e-9, atol=1e-9)


def test_the_head_is_untied_only_where_the_last_norm_has_a_gain_a_channel():
    assert not rotated(_model(), ("residual",)).config.tie_word_embeddings
    single = rotated(_model(norm="rmsnorm-single"), ("residual",))
    assert single.config.tie_word_embeddings
    assert single.lm_head.weight is single.model.embed_tokens.weight


def test_a_channel_that_stands_out_is_spread_over_all():
    model = _model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] *= 1000
    found = [
        one(torch.arange(11)[None], output_hidden_states=True).hidden_states[1].detach().abs()
        for one in (model, rotated(model, ("residual",)))
    ]
    first, then = (float((x.amax(-1) / x.square().mean(-1).sqrt()).mean()) for x in found)
    assert first > 3.5  # of 16 channels one holds nearly all: √16 = 4
    assert then < 3


IDENTITY = {"values": "identity", "head_dim": 4, "num_value_heads": 4}


@pytest.mark.parametrize(
    ("parts", "keys", "named"),
    [
        (("residual",), {"norm": "layernorm"}, "norm='layernorm'"),
        (("residual",), {"norm": "none"}, "norm='layernorm'"),  # of its first layer
        (("residual",), {"embedding_norm": "rmsnorm"}, "embedding_norm='rmsnorm'"),
        (
            ("residual",),
            {"values": "identity", "head_dim": 4, "num_value_heads": 4},
            "values='identity'",
        ),
        (("residual",), {"position": "learned"}, "position='learned' is added"),
        (("values",), {"maps": "differential"}, "maps='differential'"),
        (("values",), {"epilogue": "gate"}, "epilogue='gate'"),
        (("values",), {"normalizer": "key-value"}, "normalizer='key-value'"),
    ],
)
def test_mechanisms_that_tell_channels_apart_are_refused(parts, keys, named):
    with pytest.raises(ClearheadError, match=named):
        rotated(_model(**keys), parts)


def test_norms_keep_the_size_of_their_gains_and_no_gain_of_a_channel():
    model = _model()
    made = rotated(model, ("residual",))
    gains, before = (
        [module.weight for module in one.modules() if isinstance(module, RMSNorm)]
        for one in (made, model)
    )
    assert len(gains) == 5
    assert all(bool((gain == gain[0]).all()) for gain in gains)
    for gain, old in zip(gains, before, strict=True):
        torch.testing.assert_close(gain[0], old.square().mean().sqrt())


def test_matrices_keep_their_size_so_that_training_steps_do():
    """Gains of 0.2 within the matrices would make Adam's steps five times as large."""
    model = _model()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.copy_(torch.linspace(0.1, 0.3, 16))
    of = [
        one.model.layers[0].self_attn.q_proj.weight.square().mean().sqrt()
        for one in (rotated(model, ("residual",)), model)
    ]
    torch.testing.assert_close(*of, rtol=0.2, atol=0)
