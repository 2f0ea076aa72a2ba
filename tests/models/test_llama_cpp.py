"""Folders for llama.cpp's converter: the same function, with what llama.cpp needs beside it.

That llama.cpp then gives the same logits is tested by `make servers` (tests/servers).
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models.conversion import converted, for_llama_cpp, for_serving, logit_difference

from .space import LLAMA3, WHOLE, YARN, displaced

PARTIAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def _model(name: str, **changes: object) -> ClearheadForCausalLM:
    return displaced(preset(name, **WHOLE | changes), 0.2)


@pytest.mark.parametrize("name", ["softmax1", "sink"])
def test_a_layer_of_a_model_with_sinks_has_a_window_that_no_text_reaches(name, tmp_path):
    model = _model(name, num_key_value_heads=2)
    for_llama_cpp(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert config["sliding_window"] == 2**20
    assert config["no_rope_layers"] == [1, 1]
    made = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert logit_difference(model, made) <= 1e-5
    assert logit_difference(model, converted(made)) <= 1e-5
    ids = torch.arange(9)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(made.generate(ids, **options), model.generate(ids, **options))


def test_windows_and_layers_without_position_are_kept_and_named():
    overrides = [{"position": "none"}, {}]
    model = _model("sink", layer_overrides=overrides, **WINDOWS)
    config = for_llama_cpp(model).config
    assert config.layer_types == WINDOWS["layer_types"]
    assert config.sliding_window == 5
    assert config.no_rope_layers == [0, 1]
    assert not hasattr(for_serving(model).config, "no_rope_layers")
    assert for_llama_cpp(model.to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ClearheadError, match="LlamaForCausalLM is served as it is"):
        for_llama_cpp(converted(_model("transformer")))


def test_biases_of_a_qwen3_are_dropped_where_they_are_zero():
    model = _model("transformer", qk_norm="rmsnorm", bias=True)
    assert type(for_serving(model)).__name__ == "ClearheadServingForCausalLM"
    with pytest.raises(ClearheadError, match="no family for this model: the weights of this"):
        for_llama_cpp(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") and ".mlp." in name:
                parameter.zero_()
    made = for_serving(model)
    assert type(made).__name__ == "Qwen3ForCausalLM"
    assert logit_difference(model, converted(made)) <= 1e-5
    with pytest.raises(ClearheadError, match="reads a Qwen3 without the biases of its output"):
        for_llama_cpp(model)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("name", ["transformer", "sink"])
def test_scaled_positions_that_the_converter_reads_are_kept(name, rope):
    kept = for_llama_cpp(_model(name, rope_parameters=rope)).config.rope_parameters
    assert {key: kept[key] for key in rope} == rope


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("transformer", {"sliding_window": 5}, "reads a Mistral without its window of 5 tokens"),
        ("transformer", {"qk_norm": "rmsnorm", **WINDOWS}, "reads a Qwen3 without its window"),
        ("transformer", {"rope_parameters": PARTIAL}, "has no rope_type='proportional'"),
        (
            "softmax1",
            {"rope_parameters": {**YARN, "attention_factor": 1.5}},
            "reads rope_type='yarn' without its attention_factor",
        ),
        ("sink", {"head_dim": 16}, "reads a GraniteSWA without its head_dim=16"),
        (
            "differential",
            {"num_attention_heads": 2},
            "llama.cpp has no DiffLlama: transformers reads",
        ),
        ("sink", {"rope_parameters": DYNAMIC}, "rope_type='dynamic' rotates cached keys anew"),
        ("gated", {}, "llama.cpp has no family for this model: Llama has no epilogue='gate'"),
    ],
)
def test_what_llama_cpp_would_not_read_as_the_same_function_is_refused(name, changes, message):
    with pytest.raises(ClearheadError, match=message) as error:
        for_llama_cpp(_model(name, **changes))
    assert "\n" not in str(error.value)


def test_a_layer_without_a_value_projection_has_no_part_of_that_name():
    """vLLM merges the projections of all layers whose parts have the same names."""
    made = for_serving(_model("sas"))
    named = [[name for name, _ in layer.self_attn.named_children()] for layer in made.model.layers]
    assert ["v_proj" in names for names in named] == made.config.value_projections
    assert not all(made.config.value_projections)
