"""Weights to and from transformers' DiffLlama: the same logits in both directions."""

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models.families.llama import DIFFLLAMA

from .space import WHOLE as SHAPE


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_from_diffllama(groups, tied):
    config = DiffLlamaConfig(
        **SHAPE, num_key_value_heads=groups, tie_word_embeddings=tied, rms_norm_eps=1e-3
    )
    theirs = DiffLlamaForCausalLM(config).eval()
    ours = DIFFLLAMA.imported(theirs)
    ids = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=5e-5)
        there_and_back = DIFFLLAMA.exported(ours)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(there_and_back.state_dict()[name], weight), name


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_rotary_scaling_comes_along(kind):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0}
    shape = SHAPE | {"max_position_embeddings": 8}
    theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**shape, rope_parameters=rope)).eval()
    ids = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        ours = DIFFLLAMA.imported(theirs)
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)
        assert torch.allclose(DIFFLLAMA.exported(ours)(ids).logits, theirs(ids).logits, atol=1e-4)


@pytest.mark.parametrize("groups", [2, 4])
def test_to_diffllama_folds_the_gain_of_the_norm(groups):
    ours = ClearheadForCausalLM(
        preset("differential", **SHAPE, num_key_value_heads=groups, head_dim=12)
    ).eval()
    for layer in ours.model.layers:
        torch.nn.init.normal_(layer.self_attn.maps.norm_weight)
    theirs = DIFFLLAMA.exported(ours)
    ids = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=5e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lambda_init": 0.8}, "only lambda_init=None can be exported"),
        ({"head_norm": "none"}, "no head_norm='none'"),
        ({"normalizer": "softmax1"}, "only normalizer='softmax'"),
        ({"order": "parallel"}, "only order='sequential'"),
        ({"mlp_skip": "none"}, "only mlp_skip='identity'"),
    ],
)
def test_what_diffllama_does_not_have_is_refused(change, message):
    with pytest.raises(ClearheadError, match=message):
        DIFFLLAMA.exported(ClearheadForCausalLM(preset("differential", **SHAPE, **change)))
    with pytest.raises(ClearheadError, match="attention_bias=True"):
        DIFFLLAMA.imported(DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE, attention_bias=True)))
