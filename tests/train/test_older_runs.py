"""A run that an older version stopped half-way: older_run, made by commit 45ba971.

It was `clearhead train softmax1 --size tiny --set hidden_size=16 num_hidden_layers=2
num_attention_heads=2 intermediate_size=32 --data.data text.jsonl --train.optimizer orthoadam …`, as
its run.json says; `final` is where that version ended when nothing stopped it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead import ClearheadForCausalLM, preset
from clearhead.cli import main
from clearhead.errors import ClearheadError
from clearhead.train import checkpoint
from clearhead.train.run_dir import refuse_changes

OLDER = Path(__file__).parent / "older_run"


def test_a_run_of_an_older_version_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(OLDER, run, ignore=shutil.ignore_patterns("final", "text.jsonl"))
    shutil.copy(OLDER / "text.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", "run"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "or by an earlier version: to go on with it give its own command" in line
    assert "--train.optimizer orthoadam" in line  # its own command, for people


def test_a_model_of_an_older_version_is_opened_with_its_own_weights():
    model = ClearheadForCausalLM.from_pretrained(OLDER / "final")
    state = model.state_dict()
    for name, weight in load_file(OLDER / "final/model.safetensors").items():
        assert torch.equal(state[name], weight)
    assert model.config.normalizer == "softmax1"


def test_a_checkpoint_of_the_older_format_is_refused():
    with pytest.raises(ClearheadError, match=r"earlier version's format: delete .*the first step"):
        checkpoint.verify(OLDER / "checkpoints/step-00000010")


def test_settings_of_an_earlier_version_go_by_their_present_names(tmp_path):
    now = json.loads(preset("coca", "tiny").to_json_string(use_diff=False))
    before = now | {"scores": "collinear", "residual_scale": "trainable"}
    refuse_changes(tmp_path, {"model": before}, {"model": now})
    with pytest.raises(ClearheadError, match=r"model\.scores was 'coca-slack' and is now 'coca'"):
        refuse_changes(tmp_path, {"model": before | {"scores": "collinear-slack"}}, {"model": now})
