"""Verbs that open a model: its code runs only where allowed, and its weights are all there."""

import io
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from clearhead.cli import main

from .conftest import refusal, saved_llama

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedTokenizerFast,
)

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaModel):
    config_class = OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnForSequenceClassification(LlamaForSequenceClassification):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoModelForCausalLM": "own.OwnForCausalLM",
    "AutoModelForSequenceClassification": "own.OwnForSequenceClassification",
}


def _changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))


@pytest.fixture
def folders(tmp_path, tokenizer, monkeypatch) -> dict[str, str]:
    """Folders whose model, or whose tokenizer, has code that leaves a marker; and "plain"."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    for kind in ("plain", "model", "tokenizer"):
        one = {"num_hidden_layers": 1, "pad_token_id": tokenizer.pad_token_id}
        saved_llama(tmp_path / kind, tokenizer, **one)
        (tmp_path / kind / "own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": MODEL}
    _changed(tmp_path / "model/config.json", **own)
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    _changed(
        tmp_path / "tokenizer/tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map=auto_map,
    )
    return {kind: str(tmp_path / kind) for kind in ("plain", "model", "tokenizer")}


@pytest.fixture
def verbs(text: Path, cache: Path, tmp_path: Path) -> dict[str, list[str]]:
    """A short request of every verb that opens a model, which is to be put at MODEL."""
    data = ["--data.data", str(text), "--data.cache", str(cache), "--data.validation", "0.1"]
    out = str(tmp_path / "out")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "key value", "label": "a"}\n{"text": "head", "label": "b"}\n' * 8)
    files = ["--train-file", str(rows), "--validation-file", str(rows)]
    return {
        "generate": ["generate", "MODEL", "key", "--tokens", "2"],
        "eval": ["eval", "MODEL", "--lengths", "16", "--tokens", "64", *data],
        "diagnose": [*("diagnose", "MODEL", "--windows", "1", "--output", out, *data)],
        "quantize": [
            *("quantize", "MODEL", "--scheme", "w8a8-coarse", "--length", "16", "--tokens", "32"),
            *data,
        ],
        "deploy": [
            *("quantize", "MODEL", "--deploy", "int8-dynamic-tensor", "--output", out),
            *("--length", "16", "--tokens", "32", *data),
        ],
        "convert": ["convert", "MODEL", out],
        "finetune": [
            *("finetune", "MODEL", *files, "--output", out, "--train.epochs", "1"),
            *("--train.max-length", "8"),
        ],
    }


VERBS = ("generate", "eval", "diagnose", "quantize", "deploy", "convert")
# What is run with permission: a tokenizer's code takes one way, and deploying takes longest.
ALLOWED = {*((verb, "model") for verb in (*VERBS, "finetune") if verb != "deploy")}
ALLOWED |= {("generate", "tokenizer"), ("deploy", "tokenizer")}


def _call(words: list[str], model: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([word.replace("MODEL", model) for word in words])
    return stop.value.code


@pytest.mark.parametrize("verb", [*VERBS, "finetune"])
@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_code_runs_where_it_is_allowed_and_never_unasked(
    verb, kind, folders, verbs, tmp_path, capsys
):
    assert _call(verbs[verb], folders[kind]) == 2
    told = capsys.readouterr()
    (line,) = [line for line in told.err.splitlines() if line.startswith("clearhead: ")]
    assert "allow it by --trust-remote-code" in line
    assert "[y/N]" not in told.out + told.err
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "out").exists()
    if (verb, kind) not in ALLOWED:
        return
    if verb == "deploy":
        pytest.importorskip("torchao")
    # A class of a folder's own is opened, and has no counterpart to be converted to.
    code = 2 if (verb, kind) == ("convert", "model") else 0
    assert _call([*verbs[verb], "--trust-remote-code"], folders[kind]) == code
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_tokenizer_of_a_corpus_runs_no_code(verb, folders, going_on, tmp_path, capsys):
    words = [verb, "transformer", *going_on, "--data.tokenizer", folders["tokenizer"]]
    assert _call([*words, "--output", str(tmp_path / "out")], "") == 2
    assert "choose one of transformers' own" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(file, folders, capsys):
    path = Path(folders["plain"]) / file
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    line = refusal(capsys, "generate", folders["plain"])
    assert f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull`" in line


@pytest.mark.parametrize("verb", sorted({*VERBS, "finetune"}))
def test_missing_weights_are_refused(verb, folders, verbs, tmp_path, capsys):
    path = tmp_path / "plain/model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if ".mlp." not in key}
    save_file(weights, path, metadata={"format": "pt"})
    assert _call(verbs[verb], folders["plain"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "lacks 3 weights (model.layers.0.mlp" in told[-1]
    assert "MISSING" not in " ".join(told)
    assert not list(tmp_path.glob("out/*"))
