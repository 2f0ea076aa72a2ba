"""Models of transformers as clearhead models: equal logits at tiny size, from random weights."""

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models.conversion import converted
from clearhead.models.families import FAMILIES
from clearhead.models.starts import started, target

from .space import WHOLE

SHAPE = {**WHOLE, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LONG = {**ROPE, "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PARTIAL = {"partial_rotary_factor": 0.45}
SINKS = {"sliding_window": 5, "rope_parameters": ROPE}
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
TIED = {"tie_word_embeddings": True}
MULTIPLIERS = SINKS | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
MULTIPLIERS |= TIED | {"layer_rope_theta": [0, 50.0], "residual_multiplier": 0.4}
MULTIPLIERS |= {"logits_scaling": 2.0}
HYBRID = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 61}
OF_OTHERS = {"num_key_value_heads": 1, "rope_parameters": ROPE}  # settings
WHOLLY = {"rope_parameters": {"partial_rotary_factor": 1.0}}
NEOX = {key: value for key, value in WHOLE.items() if key != "intermediate_size"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", TIED | {"num_key_value_heads": 1, "head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    # Its attention slides in every layer.
    "mistral with types of layers": ("mistral", HYBRID),
    "diffllama": ("diffllama", {"rms_norm_eps": 1e-3}),
    "diffllama, tied": ("diffllama", TIED | {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"rope_parameters": ROPE}),
    "qwen2 with a window": ("qwen2", WINDOWED),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-3}),
    "qwen3 with a window": ("qwen3", WINDOWED),
    "granite-swa": ("granite_swa", {**SINKS, "attention_multiplier": 8**-0.5}),
    "granite-swa with multipliers": ("granite_swa", MULTIPLIERS),
    "granite-swa without position": ("granite_swa", {**SINKS, "layer_rope_theta": [0, 0]}),
    "flint without experts": ("flint", HYBRID | {"num_experts": 0}),
    "gpt2 with settings of others": ("gpt2", GPT2 | OF_OTHERS | {"n_inner": 48}),
    "gpt2 with relu": ("gpt2", {**GPT2, "activation_function": "relu"}),
    "pythia": ("gpt_neox", {"intermediate_size": 48, "rope_parameters": {"rope_theta": 500.0}}),
    "gpt-neox one after the other": ("gpt_neox", OF_OTHERS | {"use_parallel_residual": False}),
    "gpt-neox that rotates all": ("gpt_neox", WHOLLY | {"attention_bias": False}),
}
IDS = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(0))


def _model(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    shape = {} if kind == "gpt2" else SHAPE if kind != "gpt_neox" else NEOX
    config = AutoConfig.for_model(
        kind, **deepcopy({**shape, "bos_token_id": 1, "eos_token_id": 2, **settings})
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        spread = 1.0 if "sinks" in name or "bias" in name else 0.3
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=spread)
    return model


def _logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, **options).logits


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_equal_and_exact_starts_keep_them(case):
    kind, settings = CASES[case]
    theirs = _model(kind, **settings)
    ours, wanted = converted(theirs), _logits(theirs)
    assert (_logits(ours) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    starts = [(name, {}) for name in ("gated", "sink")]
    if ours.config.maps == "single":
        starts += [("differential-v2", {})]
    if ours.config.normalizer == "softmax":
        starts += [(name, {"annealed_start": True}) for name in ("softmax1", "xsa")]
    for start in starts:
        found = _logits(started(ours, target(*start)).model)
        assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max(), start


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("gpt2", GPT2, "attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1 of this GPT2 is for"),
        ("llama", {"attention_dropout": 0.2}, "attention_dropout=0.2 of this Llama is for"),
        ("llama", {}, ""),
    ],
)
def test_dropout_that_is_left_out_is_said(kind, settings, said, capsys):
    converted(_model(kind, **settings))
    assert capsys.readouterr().err[: len(said) + 9] == (said and f"{said} training")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in ("mistral", "qwen3", "granite-swa", "diffllama")),
        ("llama with biases", torch.float32),
        ("llama, tied", torch.float64),
    ],
)
def test_there_and_back_every_weight_is_the_same(case, dtype):
    """And what the configuration has for generation."""
    kind, settings = CASES[case]
    theirs = _model(kind, **settings, eos_token_id=[1, 2]).to(dtype)
    theirs.generation_config.max_new_tokens = 7
    ours = converted(theirs)
    back = converted(ours)
    assert type(back) is type(theirs)
    assert ours.dtype is dtype
    assert back.generation_config.max_new_tokens == 7
    assert back.config.eos_token_id == [1, 2]
    for name, weight in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"bias": True}, {"sliding_window": 4}, {"annealed_start": True}),
        {"layer_overrides": [{"position": "none"}, {}]},
    ],
)
@pytest.mark.parametrize("name", ["softmax1", "sink"])
def test_softmax1_and_sinks_are_exported_to_granite_swa(name, changes):
    ours = ClearheadForCausalLM(preset(name, **SHAPE, **changes)).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for layer in ours.model.layers:  # as in the middle of a training run
        layer.self_attn.normalizer.on_step_end(0.9)
    theirs = converted(ours)
    assert type(theirs).__name__ == "GraniteSWAForCausalLM"
    if "layer_overrides" in changes:
        assert theirs.config.layer_rope_theta == [0, 10_000.0]
    theirs.set_attn_implementation("eager")
    wanted = _logits(ours)
    assert (_logits(theirs) - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    again = converted(theirs)
    assert again.config.normalizer == "sink"
    assert (_logits(again) - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("groups", [2, 4])
def test_the_gain_of_a_head_s_norm_is_folded_on_the_way_to_diffllama(groups):
    changes = {"num_key_value_heads": groups, "head_dim": 12}
    ours = ClearheadForCausalLM(preset("differential", **SHAPE | changes)).eval()
    for layer in ours.model.layers:
        torch.nn.init.normal_(layer.self_attn.maps.norm_weight)
    assert torch.allclose(_logits(converted(ours)), _logits(ours), atol=5e-5)


def _ours(name: str, **changes: Any) -> ClearheadForCausalLM:
    return ClearheadForCausalLM(preset(name, **SHAPE | changes))


EXPERTS = {"sliding_window": 5, "num_experts": 4, "mlp_only_layers": [0]}
SINK_AND_KEY = {"layer_overrides": [{}, {"normalizer": "key"}]}


@pytest.mark.parametrize(
    ("make", "kind", "settings", "said"),
    [
        (_ours, "sink", {"epilogue": "gate"}, "GraniteSWA has no epilogue='gate'"),
        (_ours, "softmax1", {"qk_norm": "rmsnorm"}, "GraniteSWA has no qk_norm='rmsnorm'"),
        (_ours, "sink", SINK_AND_KEY, "no normalizer='key'"),
        (_ours, "key-bias", {}, "Llama has no normalizer='key'"),
        (_ours, "differential", {"lambda_init": 0.8}, "only lambda_init=None can be exported"),
        (_ours, "differential", {"head_norm": "none"}, "no head_norm='none'"),
        (_ours, "differential", {"normalizer": "softmax1"}, "only normalizer='softmax'"),
        (_ours, "differential", {"mlp_skip": "none"}, "only mlp_skip='identity'"),
        (_ours, "transformer", {"sliding_window": 4, "bias": True}, "Mistral has no bias=True"),
        (_model, "gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "layer_idx=True"),
        (_model, "gpt2", GPT2 | {"activation_function": "silu"}, "unknown GPT2 activation 'silu'"),
        (_model, "gpt_neox", {"rope_parameters": PARTIAL}, "3 rotated channels"),
        (_model, "llama", {"rope_parameters": ROPE | PARTIAL}, "has no effect on"),
        (_model, "llama", {"rope_parameters": LONG}, "rope_type='longrope' is none of default"),
        (_model, "granite_swa", SINKS | {"layer_rope_theta": [5.0, 9.0]}, "one base for all"),
        (_model, "flint", EXPERTS, "are not those of a ClearheadForCausalLM"),
        (_model, "gemma2", {}, "a Gemma2ForCausalLM cannot be converted: give one of DiffLlama"),
        (_model, "qwen3", {"hidden_act": "gelu"}, "a Qwen3 with hidden_act='gelu'"),
        (_model, "diffllama", {"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_what_has_no_place_is_refused(make, kind, settings, said):
    with pytest.raises(ClearheadError, match=said) as error:
        converted(make(kind, **settings))
    assert "\n" not in str(error.value)


CARDS = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
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
}


@pytest.mark.parametrize(
    ("family", "card"),
    [
        *product(["Llama", "GraniteSWA"], CARDS),  # the others read settings as Llama does
        *product(["Mistral", "Qwen2", "Qwen3", "DiffLlama"], ["llama3"]),
    ],
)
def test_rope_scaling_as_cards_have_it_is_read_as_transformers_does(family, card):
    kind = next(one for one in FAMILIES.values() if one.name == family)
    shape = {**WHOLE, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0}
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
    theirs = LlamaForCausalLM(LlamaConfig(**WHOLE, rope_parameters=rope)).eval()
    for model in (theirs, converted(theirs)):
        capsys.readouterr()
        converted(model)
        assert said in (line := capsys.readouterr().err)
        assert bool(said) == bool(line)


def test_weights_without_a_place_and_quantised_ones_are_refused():
    theirs = _model("llama")
    theirs.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ClearheadError, match=r"is already quantised \(fp8\): give the one in full"):
        converted(theirs)
    theirs = _model("llama")
    theirs.model.layers[1].self_attn.q_norm = torch.nn.LayerNorm(8, bias=False)
    said = "this LlamaForCausalLM are not those of .*layers.1.self_attn.q_norm.weight"
    with pytest.raises(ClearheadError, match=said) as error:
        converted(theirs)
    assert "\n" not in str(error.value)
