"""Schemes in the format compressed-tensors: what it can say, and what transformers reads of it."""

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clearhead import ClearheadError
from clearhead.quantize import Texts, linear_layers, quantized, scheme
from clearhead.quantize.compressed import as_loaded, check_widths, compress, stated

SAID = {
    "w8a8-static": "int-quantized",
    "w8a8-token": "int-quantized",
    "fp8-static": "float-quantized",
    "fp8-token": "float-quantized",
    "w4a16-channel": "pack-quantized",
    "w4a16-group32": "pack-quantized",
    "w8a16-group32": "pack-quantized",
}


def _texts():
    draw = torch.Generator().manual_seed(0)
    windows = list(torch.randint(0, architectures.VOCABULARY, (6, 13), generator=draw))
    return Texts(windows=windows[:2], calibration=windows[2:])


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
