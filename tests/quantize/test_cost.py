"""Schemes on models of many architectures, and in the format of compressed-tensors."""

import math

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from clearhead import ClearheadError
from clearhead.quantize import Texts, cost, left_out, linear_layers, quantized, scheme
from clearhead.quantize.compressed import as_loaded, check_widths, compress, stated

from .test_quantizers import zeropoint_oracle

NAMES = (*architectures.OTHERS, *architectures.OURS)
SCHEMES = (
    *("w8a8-coarse", "w8a8-moderate", "w8a8-fine", "w8a8-token", "w4-channel", "w4-group8"),
    *("logits8-tensor", "logits6-head", "logits4-row", "mxfp4"),
    *("hadamard-w8a8-coarse", "hadamard-w4-channel", "w8a8-static", "fp8-token", "fp8-static"),
    *("kv4", "kv-fp8-tensor", "kv4-channel-keep2", "hadamard-kv4", "w8a8-token+kv8"),
    *("a4-token", "w4-channel+a4-group8-clip90"),
)
WHOLE = ("Llama", "GPT-2", "gpt-oss", "differential")  # others are measured under each third scheme


def _texts(length: int = 13) -> Texts:
    windows = list(torch.randint(0, architectures.VOCABULARY, (4, length)))
    return Texts(windows=windows[:2], calibration=windows[2:])


@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_on_every_architecture(name):
    model = architectures.make(name)
    texts = _texts()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = {key: value.data_ptr() for key, value in model.named_parameters()}
    implementation = model.config._attn_implementation
    full = cost(model, None, texts)
    assert full.perplexity is not None
    assert full.tokens == 2 * 12
    for each in SCHEMES if name in WHOLE else SCHEMES[::3]:
        found = cost(model, scheme(each), texts)
        if ("logits" in each or "kv" in each) and name in architectures.WITHOUT_INTERFACE:
            assert "AttentionInterface" in str(found.reason)
        else:
            assert found.reason is None
            assert math.isfinite(found.perplexity)
        assert found.perplexity != full.perplexity
        assert found.unused == ()
    sixteen = ["w16a16-token", "a16-token", "hadamard-w16-channel+a16-group8", "w16-channel"]
    if name not in architectures.WITHOUT_INTERFACE:
        sixteen += ["logits16-tensor", "logits16-row", "kv16", "hadamard-kv16-channel-keep1"]
    for each in sixteen:  # which change next to nothing
        found = cost(model, scheme(each), texts).perplexity
        assert found == pytest.approx(full.perplexity, rel=5e-3)
    # Exactly the model that it was: the same tensors, no hooks, the same attention, the same loss.
    assert pointers == {key: value.data_ptr() for key, value in model.named_parameters()}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert cost(model, None, texts) == full


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT", "transformer"])
def test_embeddings_head_and_norms_are_kept(name):
    model = architectures.make(name)
    layers = linear_layers(model)
    assert model.get_output_embeddings() not in layers.values()
    assert all(isinstance(layer, nn.Linear | Conv1D) for layer in layers.values())
    touched = {f"{layer}.weight" for layer in layers}
    before = {key: value.clone() for key, value in model.named_parameters()}
    with quantized(model, scheme("w3-channel")):
        for key, value in model.named_parameters():
            assert torch.equal(value, before[key]) is (key not in touched), key
    assert left_out(model, layers) == {}


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_a_layer_by_hand(name):
    """The hooked layer is the matrix product of what the formulas give, per output channel."""
    model = architectures.make(name)
    layer_name, layer = next(iter(linear_layers(model).items()))
    weight = layer.weight.detach().double()
    weight = weight.T if isinstance(layer, Conv1D) else weight
    x = torch.randn(1, 5, weight.shape[1])
    w_top = weight.abs().amax(1, keepdim=True)
    w = (weight / w_top * 127).round() / 127 * w_top
    x_top = x.double().abs().amax(-1, keepdim=True)
    x_hat = (x.double() / x_top * 7).round() / 7 * x_top
    expected = x_hat @ w.T + (0 if layer.bias is None else layer.bias.double())
    with quantized(model, scheme("w8a4-token")) as called, torch.no_grad():
        found = layer(x)
    assert called.layers == {layer_name}
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("group", "kept"), [(None, 90), (3, 50), (8, 99)])
def test_activations_with_a_zero_point_by_hand(group, kept):
    model = architectures.make("Llama").double()
    layer = next(iter(linear_layers(model).values()))
    x = torch.randn(2, 3, layer.in_features, dtype=torch.float64)
    groups = x.flatten(0, 1).split(group or layer.in_features, 1)
    rounded = [[zeropoint_oracle(row, 4, kept / 100) for row in one.tolist()] for one in groups]
    expected = torch.cat([torch.tensor(one, dtype=torch.float64) for one in rounded], 1)
    expected = expected.view_as(x) @ layer.weight.T
    name = f"a4-{f'group{group}' if group else 'token'}-clip{kept}"
    with quantized(model, scheme(name)), torch.no_grad():
        found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_experts_are_named_as_left_out():
    model = architectures.make("gpt-oss")
    found = left_out(model, linear_layers(model))
    assert {name.rpartition(".")[2] for name in found} == {"gate_up_proj", "down_proj", "weight"}
    assert all("experts" in name or "router" in name for name in found)


def test_the_model_is_restored_after_an_error():
    model = architectures.make("Llama")
    before = {key: value.data_ptr() for key, value in model.named_parameters()}
    for name, error in (("w8a8-token", "inside"), ("w8a8-fine", "no windows")):
        with pytest.raises(Exception, match=error), quantized(model, scheme(name)):
            raise RuntimeError("inside")
    assert before == {key: value.data_ptr() for key, value in model.named_parameters()}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_weights_and_activations_that_are_no_numbers_are_named():
    model = architectures.make("Llama")
    texts = _texts()
    layers = linear_layers(model)
    name = list(layers)[3]
    with torch.no_grad():
        layers[name].weight[1, 2] = math.nan
    found = cost(model, scheme("w4-channel"), texts)
    assert found.perplexity is None
    assert name in str(found.reason)
    assert "1 NaN and 0 infinite" in str(found.reason)
    for each in ("w8a8-coarse", "logits8-row"):
        assert "NaN" in str(cost(model, scheme(each), texts).reason)
    assert "no perplexity" in str(cost(model, None, texts).reason)
    model = architectures.make("Llama")
    model.model.layers[1].input_layernorm.weight.data.fill_(math.inf)
    for each in ("w8a8-token", "w8a8-fine"):
        found = cost(model, scheme(each), texts)
        assert "the input of model.layers.1.self_attn.q_proj" in str(found.reason)


def test_layers_of_which_only_the_weights_are_used():
    """Mamba multiplies by dt_proj's weight itself: no input of it can be calibrated or rounded."""
    model = architectures.make("Mamba")
    texts = _texts()
    assert "the calibration text never went through" in str(
        cost(model, scheme("w8a8-fine"), texts).reason
    )
    found = cost(model, scheme("w8a8-token"), texts)
    assert found.perplexity is not None
    assert {name.rpartition(".")[2] for name in found.unused} == {"dt_proj"}
    assert "AttentionInterface" in str(cost(model, scheme("logits8-row"), texts).reason)


def test_a_quantised_model_is_refused():
    model = architectures.make("Llama")
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ClearheadError, match=r"already quantised \(torchao\)"):
        linear_layers(model)
    model = architectures.make("Llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ClearheadError, match="int8, so the model is already quantised"):
        linear_layers(model)


def test_scales_do_not_depend_on_the_batch():
    """Each text has scales of its own, whatever the others are."""
    model = architectures.make("Llama")
    loud, quiet = _texts().windows
    alone = cost(model, scheme("w8a4-coarse"), Texts(windows=[quiet]))
    both = cost(model, scheme("w8a4-coarse"), Texts(windows=[loud, quiet]))
    other = cost(model, scheme("w8a4-coarse"), Texts(windows=[loud]))
    mean = (math.log(alone.perplexity) + math.log(other.perplexity)) / 2
    assert math.log(both.perplexity) == pytest.approx(mean, abs=1e-9)


SAID = {
    "w8a8-static": "int-quantized",
    "w8a8-token": "int-quantized",
    "fp8-static": "float-quantized",
    "fp8-token": "float-quantized",
    "w4a16-channel": "pack-quantized",
    "w4a16-group32": "pack-quantized",
    "w8a16-group32": "pack-quantized",
}


def _llama():
    return architectures.make("Llama", hidden_size=32, intermediate_size=64, head_dim=8)


@pytest.mark.parametrize("name", SAID)
def test_transformers_loads_what_was_simulated(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    model, texts = _llama(), _texts()
    ids = torch.stack(list(texts.windows))
    with torch.no_grad():
        full = model(ids).logits
        with quantized(model, as_loaded(scheme(name)), texts):
            simulated = model(ids).logits
            weights = {k: v.weight.data.clone() for k, v in linear_layers(model).items()}
    compressor = compress(model, scheme(name), texts)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.quantization_config.quantization_config.format == SAID[name]
    with torch.no_grad():
        found = loaded(ids).logits  # weights are unpacked at the first call
    layers = dict(loaded.named_modules())
    for key, weight in weights.items():
        assert torch.equal(layers[key].weight.data, weight), key
    torch.testing.assert_close(found, simulated)
    assert (simulated - full).norm() > 1e-2 * full.norm()


def test_a_model_in_16_bits_has_the_codes_of_float32(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = _llama().to(torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().float()
    top_O = weight.abs().amax(1, keepdim=True)
    compress(model, scheme("w8a8-token"), _texts())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(saved[name], (weight / (top_O / 127)).round().to(torch.int8))
    torch.testing.assert_close(saved[f"{name}_scale"], top_O / 127)
    assert saved["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["w8a8-coarse", "w3-group64", "hadamard-w8a8-token", "kv8", "fp8-static+kv-fp8"]
)
def test_a_scheme_that_the_format_cannot_say(name):
    with pytest.raises(ClearheadError, match=r"cannot say .*: choose "):
        stated(scheme(name))


@pytest.mark.parametrize(
    ("model", "name", "said"),
    [
        ("Llama", "w4a16-group48", "no whole groups of 48: choose a group that divides them"),
        ("GPT-2", "w8a8-token", "Conv1D: compressed-tensors holds nn.Linear alone"),
    ],
)
def test_layers_that_the_format_cannot_hold(model, name, said):
    with pytest.raises(ClearheadError, match=said):
        check_widths(linear_layers(architectures.make(model)), scheme(name))
