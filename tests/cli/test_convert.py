"""clearhead convert, from folder to folder."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DiffLlamaForCausalLM, LlamaForCausalLM

from clearhead import ClearheadForCausalLM
from clearhead.cli import main
from clearhead.models import conversion
from clearhead.models.llama import to_llama


def _call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return stop.value.code


@pytest.mark.parametrize(
    ("preset", "kind"), [("transformer", LlamaForCausalLM), ("differential", DiffLlamaForCausalLM)]
)
def test_a_trained_model_there_and_back(preset, kind, settings, tmp_path, capsys):
    run, there, back = (str(tmp_path / name) for name in ("run", "there", "back"))
    assert _call("train", preset, "--output", run, *settings) == 0
    capsys.readouterr()
    assert _call("convert", run, there) == 0
    told = capsys.readouterr().out
    assert f"ClearheadForCausalLM → {kind.__name__}, with equal logits: {there}" in told
    theirs = AutoModelForCausalLM.from_pretrained(there)
    ours = AutoModelForCausalLM.from_pretrained(f"{run}/final")
    assert type(theirs) is kind
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-4)
    assert AutoTokenizer.from_pretrained(there)("a key")["input_ids"]
    assert _call("convert", there, back) == 0
    assert _call("generate", back, "attention", "--tokens", "4") == 0
    again = AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is ClearheadForCausalLM
    if kind is LlamaForCausalLM:  # DiffLlama has no gain for a head's norm: W_O has taken it
        first, last = (
            load_file(f"{folder}/model.safetensors") for folder in (f"{run}/final", back)
        )
        assert first.keys() == last.keys()
        assert all(torch.equal(first[name], last[name]) for name in first)


def test_what_cannot_be_converted_leaves_nothing(settings, tmp_path, capsys, monkeypatch):
    run, made = tmp_path / "run", tmp_path / "made"
    assert _call("train", "softmax1", "--output", str(run), *settings) == 0
    assert _call("convert", str(run), str(made)) == 2
    assert "Llama has no normalizer='softmax1': only normalizer='softmax'" in _error(capsys)
    assert _call("convert", str(run), str(run)) == 2
    assert "run exists: give the folder of a model not made yet" in _error(capsys)
    assert _call("convert", str(tmp_path / "none"), str(made)) == 2
    assert "cannot load a model" in _error(capsys)
    plain = tmp_path / "plain"
    assert _call("train", "transformer", "--output", str(plain), *settings) == 0

    def wrong(model: ClearheadForCausalLM) -> LlamaForCausalLM:
        broken = to_llama(model)
        torch.nn.init.zeros_(broken.model.norm.weight)
        return broken

    monkeypatch.setattr(conversion, "to_llama", wrong)
    assert _call("convert", str(plain), str(made)) == 2
    assert "ClearheadForCausalLM gives other logits, by 1 of their size" in _error(capsys)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("run", "plain")]


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]
