"""Models by their names on the hub, from a cache that was filled before: no network."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clearhead.data import tokenizer as tokenizers
from clearhead.errors import ClearheadError
from clearhead.models.hub import _silence, reachable

from .conftest import call, refusal, saved_llama

NONE = "owner/none"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, text: Path) -> Path:
    """A cache of the hub with the model owner/tiny, laid out as huggingface_hub does."""
    repository = tmp_path / "hub/models--owner--tiny"
    lines = (path.read_text("utf-8") for path in text.iterdir())
    saved_llama(repository / "snapshots" / COMMIT, tokenizers.train(lines, 300))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT, "utf-8")
    return repository.parent


def _clearhead(hub: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    """A new process, as huggingface_hub reads these variables once, in a folder without models."""
    return subprocess.run(
        [sys.executable, "-m", "clearhead", *map(str, words)],
        cwd=hub,
        env={**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def online(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that moves the hub of this process to an address."""

    def move(address: str, *, timeout: int = 10) -> None:
        changes = {"ENDPOINT": address, "HF_HUB_ETAG_TIMEOUT": timeout}
        changes |= {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(hub)}
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        changes["HUGGINGFACE_CO_URL_TEMPLATE"] = template
        for name, value in changes.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        _silence.cache_clear()

    monkeypatch.chdir(hub)
    return move


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("verb", ["convert", "train", "reproduce"])
def test_a_hub_that_cannot_be_reached_is_refused_soon(verb, online, silent, tmp_path, capsys):
    """huggingface_hub waits for 23 s beside its time-outs, for each file."""
    output = tmp_path / "output"
    words = {
        "convert": (NONE, output),
        "train": ("--from", NONE, "--data.data", tmp_path, "--output", output),
        "reproduce": ("retrofit", "--scale", "tiny", "--from", NONE, "--output", output),
    }[verb]
    online(silent, timeout=1)
    began = time.monotonic()
    line = refusal(capsys, verb, *words)
    assert time.monotonic() - began < 15
    assert f"'{NONE}' is neither a folder nor in the cache, and {silent} does not answer (" in line


def test_a_model_of_the_cache_needs_no_hub(online, silent, tmp_path, capsys):
    """Nor do its optional files, which the cache cannot have."""
    made = tmp_path / "made"
    online(silent, timeout=1)
    began = time.monotonic()
    assert call("convert", "owner/tiny", made) == 0
    assert time.monotonic() - began < 15
    assert f"{silent} does not answer (" in capsys.readouterr().err
    assert (made / "model.safetensors").exists()
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.fixture
def answering(online: Callable[..., None]) -> Iterator[type[BaseHTTPRequestHandler]]:
    """A hub whose answers all have the `status` of this class."""

    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_HEAD(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        online(f"http://127.0.0.1:{server.server_port}")
        yield Handler
        server.shutdown()


@pytest.mark.parametrize("status", [401, 404])
def test_a_hub_that_says_no_has_answered(status, answering):
    answering.status = status
    with reachable(NONE):
        assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_in_need_has_not_answered(status, answering):
    answering.status = status
    with pytest.raises(ClearheadError, match=rf"does not answer \(.*{status}"), reachable(NONE):
        pass


def test_training_goes_on_from_a_name_on_the_hub(hub, text, tmp_path):
    options = ["--data.data", text, "--data.validation", "0.1", "--train.tokens", "64"]
    options += ["--train.sequence-length", "16", "--train.batch-size", "2"]
    options += ["--train.precision", "fp32", "--data.cache", tmp_path / "tokens"]
    run = tmp_path / "run"
    done = _clearhead(hub, "train", "--from", "owner/tiny", *options, "--output", run)
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "run.json").read_text("utf-8"))
    assert record["description"]["from"]["name"] == "owner/tiny"
    weights = load_file(run / "final/model.safetensors")
    start = load_file(hub / "models--owner--tiny/snapshots" / COMMIT / "model.safetensors")
    assert weights.keys() == start.keys()
    assert 0 < max(float((weights[key] - start[key]).abs().max()) for key in start) < 0.1
    # A name that the cache has not: one line, and no run.
    refused = _clearhead(hub, "train", "--from", "owner/none", *options, "--output", run / "none")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "'owner/none'" in refused.stderr
    assert not (run / "none").exists()


@pytest.mark.parametrize("name", ["owner/tiny", "owner/none"])
def test_a_folder_with_the_owner_s_name_hides_no_model_of_the_cache(name, hub):
    (hub / "owner").mkdir()
    done = _clearhead(hub, "generate", name, "attention", "--tokens", "2")
    if name == "owner/tiny":
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("attention")
    else:
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "a model of the hub is opened once `hf download owner/none` has fetched it" in line


def test_a_name_on_the_hub_is_converted(hub, tmp_path):
    made = tmp_path / "made"
    done = _clearhead(hub, "convert", "owner/tiny", made, "--to", "differential-v2")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM → ClearheadForCausalLM, with equal logits" in done.stdout
    theirs = AutoModelForCausalLM.from_pretrained(hub / "models--owner--tiny/snapshots" / COMMIT)
    ours, ids = AutoModelForCausalLM.from_pretrained(made), torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)
