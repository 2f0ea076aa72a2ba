"""Models by their names on the hub, from a cache that was filled before: no network."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .conftest import STEPS, data_of, saved_llama

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
