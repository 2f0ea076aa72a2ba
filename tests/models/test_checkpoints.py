"""Save, then load in a clean process: the same logits bit for bit, by three ways in."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clearhead
from clearhead import (
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
    preset,
)

from .space import stirred

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}

# The clearhead under test, which need not be the one installed.
SOURCE = str(Path(clearhead.__file__).parents[1])
ENVIRONMENT = {"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE}

READ = """
import sys, torch
{first}
import transformers
from safetensors.torch import save_file
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    auto = getattr(transformers, folder.rpartition("-")[2])
    try:
        model = auto.from_pretrained(folder, {options})
    except ImportError as error:
        print("pip install clearhead" in str(error))
        continue
    with torch.no_grad():
        logits = model.eval()(torch.arange(18).view(2, 9)).logits
    save_file({{"logits": logits}}, folder + "/logits.safetensors")
"""
HIDE = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "clearhead":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
REMOTE = "trust_remote_code=True"


@pytest.mark.parametrize(
    ("first", "options"),
    [("import clearhead.models", ""), ("", REMOTE), (HIDE, REMOTE)],
    ids=["clearhead", "remote-code", "not-installed"],
)
def test_a_clean_process_gives_the_same_bits_or_says_what_to_install(
    first, options, tmp_path, warm
):
    """Also of matrices that are drawn once and never trained: they are in the checkpoint."""
    kinds = [
        (ClearheadForMaskedLM, "bert", "AutoModelForMaskedLM"),
        (ClearheadForSequenceClassification, "bert", "AutoModelForSequenceClassification"),
    ]
    for name in ("differential", "gpt2", "key-value", "skipless", "sas", "sas-p-nonorm"):
        kinds.append((ClearheadForCausalLM, name, "AutoModelForCausalLM"))
    models = {
        tmp_path / f"{name}-{auto}": stirred(kind(preset(name, **SHAPE)))
        for kind, name, auto in kinds
    }
    for folder, model in models.items():
        model.save_pretrained(folder)
    code = READ.format(first=first, options=options)
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), **ENVIRONMENT}
    done = warm.run("-c", code, *models, env=environment)
    assert done.returncode == 0, done.stderr
    if first == HIDE:
        assert done.stdout.split() == ["True"] * len(models)
        return
    for folder, model in models.items():
        with torch.no_grad():
            want = model(torch.arange(18).view(2, 9)).logits
        assert torch.equal(load_file(folder / "logits.safetensors")["logits"], want)


AGAIN = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
    first, second = sys.argv[1], sys.argv[1] + auto.__name__
    for _ in range(2):
        auto.from_pretrained(first, trust_remote_code=True).save_pretrained(second)
        first, second = second, second + "-again"
"""


def test_a_model_opened_as_remote_code_and_saved_again_brings_no_copy_of_our_code(tmp_path, warm):
    ClearheadForCausalLM(preset("coca", **SHAPE)).save_pretrained(tmp_path / "model")
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), **ENVIRONMENT}
    done = warm.run("-c", AGAIN, tmp_path / "model", env=environment)
    assert done.returncode == 0, done.stderr
    wanted = json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"]
    assert set(wanted.values()) > {"modeling_clearhead.ClearheadConfig"}
    for folder in tmp_path.glob("model*"):
        assert json.loads((folder / "config.json").read_text())["auto_map"] == wanted
        assert [path.name for path in folder.glob("*.py")] == ["modeling_clearhead.py"]
    other = type("Other", (clearhead.ClearheadConfig,), {})  # of a package that brings its code
    other.register_for_auto_class()
    assert (other._auto_class, clearhead.ClearheadConfig._auto_class) == ("AutoConfig", None)
