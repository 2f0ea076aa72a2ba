"""Verbs that open a model: its code runs only where allowed, and its weights are all there."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from .conftest import STEPS, call, data_of, refusal, rewritten, saved_llama

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


@pytest.fixture
def folders(tmp_path, tokenizer, monkeypatch) -> dict[str, Path]:
    """Folders whose model, or whose tokenizer, has code that leaves a marker; and "plain"."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    folders = {kind: tmp_path / kind for kind in ("plain", "model", "tokenizer")}
    for folder in folders.values():
        one = {"num_hidden_layers": 1, "pad_token_id": tokenizer.pad_token_id}
        saved_llama(folder, tokenizer, **one)
        (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": MODEL}
    theirs = {"tokenizer_class": "OwnTokenizer"}
    theirs |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    for path, changes in (
        (folders["model"] / "config.json", own),
        (folders["tokenizer"] / "tokenizer_config.json", theirs),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))
    return folders


@pytest.fixture
def verbs(text: Path, cache: Path, tmp_path: Path) -> dict[str, list[str]]:
    """A short request of every verb that opens a model, which is to be put at MODEL."""
    out, rows = tmp_path / "out", tmp_path / "rows.jsonl"
    rows.write_text('{"text": "key value", "label": "a"}\n{"text": "head", "label": "b"}\n' * 8)
    requests = {
        "generate": "generate MODEL key --tokens 2",
        "eval": "eval MODEL --lengths 16 --tokens 64 DATA",
        "diagnose": f"diagnose MODEL --windows 1 --output {out} DATA",
        "quantize": "quantize MODEL --scheme w8a8-coarse --length 16 --tokens 32 DATA",
        "deploy": "quantize MODEL --deploy int8-dynamic-tensor --length 16 --tokens 32 DATA"
        f" --output {out}",
        "convert": f"convert MODEL {out}",
        "finetune": f"finetune MODEL --train-file {rows} --validation-file {rows} --output {out}"
        " --train.epochs 1 --train.max-length 8",
    }
    data = " ".join(data_of(text, cache))
    return {verb: words.replace("DATA", data).split() for verb, words in requests.items()}


VERBS = ("generate", "eval", "diagnose", "quantize", "deploy", "convert")
# What is run with permission: a tokenizer's code takes one way, and deploying takes longest.
ALLOWED = {*((verb, "model") for verb in (*VERBS, "finetune") if verb != "deploy")}
ALLOWED |= {("generate", "tokenizer"), ("deploy", "tokenizer")}


def _call(words: list[str], model: Path) -> int:
    return call(*(model if word == "MODEL" else word for word in words))


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
    said = refusal(capsys, *words, "--output", tmp_path / "out")
    assert "choose one of transformers' own" in said
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("verb", sorted({*VERBS, "finetune"}))
def test_missing_weights_are_refused(verb, folders, verbs, tmp_path, capsys):
    rewritten(folders["plain"], lambda w: [w.pop(key) for key in [*w] if ".mlp." in key])
    assert _call(verbs[verb], folders["plain"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "lacks 3 weights (model.layers.0.mlp" in told[-1]
    assert "MISSING" not in " ".join(told)
    assert not list(tmp_path.glob("out/*"))


# clearhead generate, whatever a folder recommends


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 1.8},
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


# Names of the hub, from a cache that was filled before: no network

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, tokenizer: Any) -> Path:
    """A cache of the hub with the model owner/tiny, laid out as huggingface_hub does."""
    repository = tmp_path / "hub/models--owner--tiny"
    saved_llama(repository / "snapshots" / COMMIT, tokenizer)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT, "utf-8")
    return repository.parent


@pytest.fixture
def clearhead(hub: Path, warm: Any) -> Callable[..., Any]:
    """Runs a command line in a new process with this cache, in a folder without models."""

    def run(*words: object) -> Any:
        environment = os.environ | {"HF_HUB_CACHE": str(hub)}
        return warm.run("-m", "clearhead", *words, cwd=hub, env=environment)

    return run


def test_training_goes_on_from_a_name_on_the_hub(hub, clearhead, text, tmp_path):
    options = [*data_of(text, tmp_path / "tokens"), *STEPS]
    run = tmp_path / "run"
    done = clearhead("train", "--from", "owner/tiny", *options, "--output", run)
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "run.json").read_text("utf-8"))
    assert record["description"]["from"]["name"] == "owner/tiny"
    weights = load_file(run / "final/model.safetensors")
    start = load_file(hub / "models--owner--tiny/snapshots" / COMMIT / "model.safetensors")
    assert weights.keys() == start.keys()
    assert 0 < max(float((weights[key] - start[key]).abs().max()) for key in start) < 0.1


@pytest.mark.parametrize("name", ["owner/tiny", "owner/none"])
def test_a_folder_with_the_owner_s_name_hides_no_model_of_the_cache(name, hub, clearhead):
    (hub / "owner").mkdir()
    done = clearhead("generate", name, "attention", "--tokens", "2")
    if name == "owner/tiny":
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("attention")
    else:
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "(no such folder)" in line
