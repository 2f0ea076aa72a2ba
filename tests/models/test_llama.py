"""Weights to and from transformers' Llama: the same logits in both directions."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import PRESETS
from clearhead.models.conversion import converted
from clearhead.models.families import FAMILIES
from clearhead.models.families.llama import LLAMA

from .space import WHOLE as SHAPE

IDS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(groups, tied, dtype):
    config = LlamaConfig(
        **SHAPE,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-3,
        head_dim=12,
        eos_token_id=[1, 2],
    )
    theirs = LlamaForCausalLM(config).to(dtype).eval()
    theirs.generation_config.max_new_tokens = 7
    ours = converted(theirs)
    assert ours.dtype is dtype
    with torch.no_grad():
        assert torch.allclose(ours(IDS).logits, theirs(IDS).logits, atol=5e-5)
    back = converted(ours)
    assert back.generation_config.max_new_tokens == 7
    assert back.config.eos_token_id == [1, 2]
    for name, weight in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


CARDS = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "both keys": {"type": "linear", "rope_type": "linear", "factor": 4.0, "finetuned": True},
    "keys at odds": {"type": "dynamic", "rope_type": "linear", "factor": 4.0},
    "llama3": {
        **{"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 8, "beta_fast": 32, "rope_theta": 5e3},
    },
    "attn_factor": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        **{"attn_factor": 0.878, "extrapolation_factor": 1.0, "attention_factor": None},
    },
    "a factor left out": {"rope_type": "yarn", "factor": None, "beta_slow": 1},
    "default": {"type": "default", "factor": 4.0, "mscale": 1.0, "beta_fast": 32},
    "of all channels": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Qwen3", "DiffLlama", "GraniteSWA"]
)
@pytest.mark.parametrize("card", CARDS)
def test_rope_scaling_as_cards_have_it_is_read_as_transformers_does(family, card):
    kind = next(one for one in FAMILIES.values() if one.name == family)
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0}
    more = {"layer_rope_theta": None, "layer_types": None} if family == "GraniteSWA" else {}
    config = kind.model.config_class(**shape, **more, rope_scaling=dict(CARDS[card]))
    theirs = kind.model(config).eval()
    with torch.no_grad():
        ours = converted(theirs)
        assert torch.allclose(ours(IDS).logits, theirs(IDS).logits, atol=1e-4)
        assert torch.allclose(converted(ours)(IDS).logits, theirs(IDS).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "said"), [("dynamic", "with a cache, transformers and"), ("linear", "")]
)
def test_where_a_dynamic_base_differs_is_said(kind, said, capsys):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0}
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    for model in (theirs, converted(theirs)):
        capsys.readouterr()
        converted(model)
        assert said in (line := capsys.readouterr().err)
        assert bool(said) == bool(line)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "transformer" and "bert" not in n])
def test_every_other_preset_is_refused(name):
    config = preset(name, "tiny", num_hidden_layers=1, vocab_size=61)
    with pytest.raises(ClearheadError, match=r"Llama has no \w+=.*: only .* can be exported"):
        LLAMA.exported(ClearheadForCausalLM(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"order": "parallel"}, "no order='parallel': only order='sequential'"),
        ({"mlp_skip": "none"}, "only mlp_skip='identity'"),
        ({"embedding_norm": "rmsnorm"}, "only embedding_norm='none'"),
        ({"first_values": "reparametrised"}, "only values='linear'"),
    ],
)
def test_what_llama_does_not_have_is_refused(change, said):
    with pytest.raises(ClearheadError, match=said):
        LLAMA.exported(ClearheadForCausalLM(preset("transformer", **SHAPE, **change)))


def test_what_starts_or_trains_a_layer_does_not_matter():
    changes = {"query_range": 0.0, "dropout": 0.1, "initializer_range": 0.05}
    ours = ClearheadForCausalLM(preset("transformer", **SHAPE | changes)).eval()
    with torch.no_grad():
        assert torch.allclose(LLAMA.exported(ours)(IDS).logits, ours(IDS).logits, atol=5e-5)


def test_widths_that_transformers_refuses_are_refused_in_a_line():
    odd = preset("transformer", **SHAPE | {"num_attention_heads": 5, "head_dim": 8})
    with pytest.raises(ClearheadError, match="no hidden_size=32 with 5 heads"):
        LLAMA.exported(ClearheadForCausalLM(odd))


def test_a_quantised_model_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ClearheadError, match=r"is quantised \(fp8\): save a copy in full"):
        converted(model)
