"""clearhead convert, from folder to folder."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffLlamaForCausalLM,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from clearhead import ClearheadForCausalLM
from clearhead.cli import main
from clearhead.models import conversion
from clearhead.models.families.llama import LLAMA


def _call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return stop.value.code


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("transformer", LlamaForCausalLM),
        ("differential", DiffLlamaForCausalLM),
        ("sink", GraniteSWAForCausalLM),
    ],
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
    if (
        kind is not DiffLlamaForCausalLM
    ):  # DiffLlama has no gain for a head's norm: W_O has taken it
        first, last = (
            load_file(f"{folder}/model.safetensors") for folder in (f"{run}/final", back)
        )
        assert first.keys() == last.keys()
        assert all(torch.equal(first[name], last[name]) for name in first)


def test_what_cannot_be_converted_leaves_nothing(settings, tmp_path, capsys, monkeypatch):
    run, made = tmp_path / "run", tmp_path / "made"
    assert _call("train", "key-bias", "--output", str(run), *settings) == 0
    assert _call("convert", str(run), str(made)) == 2
    assert "Llama has no normalizer='key': only normalizer='softmax'" in _error(capsys)
    assert _call("convert", str(run), str(run)) == 2
    assert "run exists: give the folder of a model not made yet" in _error(capsys)
    assert _call("convert", str(tmp_path / "none"), str(made)) == 2
    assert "cannot load a model" in _error(capsys)
    plain = tmp_path / "plain"
    assert _call("train", "transformer", "--output", str(plain), *settings) == 0

    def wrong(model: ClearheadForCausalLM) -> LlamaForCausalLM:
        broken = LLAMA.exported(model)
        torch.nn.init.zeros_(broken.model.norm.weight)
        return broken

    other = conversion.FAMILIES["LlamaForCausalLM"]._replace(write=wrong)
    monkeypatch.setitem(conversion.FAMILIES, "LlamaForCausalLM", other)
    assert _call("convert", str(plain), str(made)) == 2
    assert "ClearheadForCausalLM gives other logits, by 1 of their size" in _error(capsys)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("run", "plain")]


def test_few_bits_are_refused_with_the_way_back(tmp_path, capsys):
    made, folder = tmp_path / "made", tmp_path / "bits"
    folder.mkdir()
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")
    for name in (folder, folder / "model.Q4_1.gguf"):
        assert _call("convert", str(name), str(made)) == 2
        assert "gguf_file='model.Q4_1.gguf'), save_pretrained" in _error(capsys)
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    LlamaConfig(quantization_config=quantised).save_pretrained(folder)
    (folder / "model.Q4_1.gguf").unlink()
    assert _call("convert", str(folder), str(made)) == 2
    assert "is quantised (bitsandbytes): open it with model.dequantize()" in _error(capsys)
    assert not made.exists()


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]
