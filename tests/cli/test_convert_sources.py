"""Folders that `clearhead convert` and `train --from` take in or refuse for what they hold."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from .conftest import call


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, to be changed."""
    return Path(shutil.copytree(llama, tmp_path / "source"))


@pytest.fixture
def going_on(settings: list[str]) -> list[str]:
    """Options of a job of two steps, of a model with a tokenizer of its own."""
    place = settings.index("--data.vocabulary")
    return settings[:place] + settings[place + 2 :]


def test_an_adapter_beside_its_model_is_merged(source, going_on, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(source)
    chosen = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    settings = peft.LoraConfig(**chosen, r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        model.lm_head.modules_to_save["default"].weight.mul_(2)
    adapted.save_pretrained(source)
    theirs, ids = AutoModelForCausalLM.from_pretrained(source).eval(), torch.arange(20)[None]
    for words in ((), ("--to", "gated")):
        made = tmp_path / f"made{len(words)}"
        assert call("convert", source, made, *words) == 0
        assert "with equal logits" in capsys.readouterr().out
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(made)(ids).logits
            assert torch.allclose(found, theirs(ids).logits, atol=1e-4)
    run = tmp_path / "run"
    assert call("train", "--from", source, "--output", run, *going_on) == 0
