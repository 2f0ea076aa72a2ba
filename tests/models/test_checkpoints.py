"""Save, then load in a clean process: the same logits bit for bit, by three ways in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clearhead
from clearhead import ClearheadForCausalLM, preset

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}

# The clearhead under test, which need not be the one installed.
SOURCE = str(Path(clearhead.__file__).parents[1])
ENVIRONMENT = {"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE}

READ = """
import sys, torch
{first}
from transformers import AutoModelForCausalLM
from safetensors.torch import save_file
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained({folder!r}, {options})
torch.manual_seed(7)
ids = torch.randint(0, 61, (2, 9))
with torch.no_grad():
    save_file({{"logits": model.eval()(ids).logits}}, {out!r})
"""


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ("import clearhead.models", ""),
        ("", "trust_remote_code=True"),
        ("import clearhead.models", "trust_remote_code=True"),
    ],
    ids=["clearhead", "remote-code", "both"],
)
@pytest.mark.parametrize("name", ["differential", "gpt2"])
def test_a_clean_process_gives_the_same_bits(first, options, name, tmp_path):
    torch.set_num_threads(1)
    model = ClearheadForCausalLM(preset(name, **SHAPE)).eval()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    code = READ.format(
        first=first, folder=str(folder), options=options, out=str(tmp_path / "out.safetensors")
    )
    environment = {"HF_HOME": str(tmp_path / "hub"), **ENVIRONMENT}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    torch.manual_seed(7)
    ids = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        want = model(ids).logits
    assert torch.equal(load_file(tmp_path / "out.safetensors")["logits"], want)


def test_without_clearhead_transformers_says_what_to_install(tmp_path):
    ClearheadForCausalLM(preset("softmax1", **SHAPE)).save_pretrained(tmp_path / "model")
    code = f"""
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "clearhead":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
"""
    environment = {"HF_HOME": str(tmp_path / "hub"), **ENVIRONMENT}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert ran.returncode != 0
    assert "pip install clearhead" in ran.stderr


def test_a_checkpoint_is_safetensors_and_readable(tmp_path):
    config = preset("differential", **SHAPE, lambda_init=0.8)
    ClearheadForCausalLM(config).save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "modeling_clearhead.py"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["maps"] == "differential"
    assert saved["lambda_init"] == 0.8
    again = ClearheadForCausalLM.from_pretrained(tmp_path).config
    assert again.layer(1) == config.layer(1)
    assert again.to_dict().keys() == config.to_dict().keys()


def test_parameters_missing_from_a_checkpoint_are_initialised(tmp_path):
    """transformers builds models on the meta device: an uninitialised λ would be garbage."""
    ClearheadForCausalLM(preset("transformer", **SHAPE)).save_pretrained(tmp_path)
    model = ClearheadForCausalLM.from_pretrained(tmp_path, config=preset("differential", **SHAPE))
    for layer in model.model.layers:
        maps = layer.self_attn.maps
        assert (maps.norm_weight == 1).all()
        assert 0.01 < maps.lambda_q1.std() < 0.3
