"""clearhead generate: what its options say, whatever a model's folder recommends."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import call, rewritten


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 1.8},
        {"num_beams": 3},
        {"no_repeat_ngram_size": 1},
        {"penalty_alpha": 0.6, "top_k": 4},  # code from the hub, which transformers asks for
    ],
)
def test_the_likeliest_tokens_whatever_the_model_recommends(own, llama, tmp_path, capsys):
    folder = shutil.copytree(llama, tmp_path / "source")
    (folder / "generation_config.json").write_text(json.dumps(own))
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = [tokenizer.bos_token_id, *tokenizer("attention", add_special_tokens=False).input_ids]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    capsys.readouterr()
    words = ("generate", folder, "attention", "--tokens", 12, "--temperature", 0)
    assert call(*words) == 0
    wanted = tokenizer.decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out.rstrip("\n") == wanted.rstrip("\n")


def test_a_path_from_the_home_folder_is_found(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(llama.parent))
    assert call("generate", f"~/{llama.name}", "attention", "--tokens", 1) == 0
    assert call("convert", f"~/{llama.name}", tmp_path / "made") == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("convert", llama, "~/other") == 0
    assert (tmp_path / "other/model.safetensors").exists()


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_are_said_and_end_in_1(llama, tmp_path, capsys, temperature):
    folder = shutil.copytree(llama, tmp_path / "broken")
    rewritten(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    assert call("generate", folder, "a", "--temperature", temperature) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("clearhead: the model's logits are not finite")
