"""A model whose own class has dropout, as the start of a run and of a comparison's arms."""

import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from .conftest import call


def _losses(folder):
    lines = map(json.loads, (folder / "records.jsonl").read_text("utf-8").splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    return {
        name: [line["loss"] for line in steps if line["run"] == f"{name}/seed0"]
        for name in ("transformer", "differential-v2")
    }


def test_only_a_lone_run_has_the_dropout_of_its_class(settings, tokenizer, tmp_path, capsys):
    source = tmp_path / "source"
    shape = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.5}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(source)
    tokenizer.save_pretrained(source)
    place = settings.index("--data.vocabulary")
    words = ["--from", source, *settings[:place], *settings[place + 2 :]]

    small = ["--lengths", "1", "--evaluation-tokens", "64", "--output", tmp_path / "arms"]
    assert call("compare", "transformer", "differential-v2", *words, *small) == 0
    said = capsys.readouterr().err
    assert "attn_pdrop=0.5, embd_pdrop=0.1, resid_pdrop=0.1: left out of every arm" in said
    one, other = _losses(tmp_path / "arms").values()
    assert abs(one[0] - other[0]) < 1e-5  # the same function still

    assert call("train", *words, "--output", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run/final/config.json").read_text("utf-8"))
    assert config["attn_pdrop"] == 0.5
