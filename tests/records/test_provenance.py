"""The source that made a record: a commit, or nothing known."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.records.provenance import KEYS, provenance, source_of

SOURCE = Path(clearhead.__file__).parent
ASK = "import json; from clearhead.records.provenance import source; print(json.dumps(source()))"
NEEDED = ("__init__.py", "versions.py", "errors.py", "terminal.py", "records")


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def copy(tmp_path):
    """The ground floor of the package in a repository that does not know it."""
    package = tmp_path / "src" / "clearhead"
    package.mkdir(parents=True)
    for name in NEEDED:
        copied = shutil.copytree if (SOURCE / name).is_dir() else shutil.copy
        copied(SOURCE / name, package / name)
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "-q", "-m", "another project")
    return package


def code_of(package):
    ran = subprocess.run(
        [sys.executable, "-B", "-c", ASK],
        env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin", "GIT_DIR": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def test_a_checkout_is_known_by_its_commit_and_a_change_marks_it(copy):
    assert code_of(copy) == {}  # in another project's repository
    git(copy, "add", ".")
    git(copy, "commit", "-q", "-m", "ours")
    commit = git(copy, "rev-parse", "HEAD")
    assert code_of(copy) == {"commit": commit, "dirty": False}
    (copy.parent.parent / "notes.txt").touch()  # outside the package
    assert code_of(copy) == {"commit": commit, "dirty": False}
    with (copy / "errors.py").open("a") as file:
        file.write("# a change\n")
    assert code_of(copy) == {"commit": commit, "dirty": True}


def test_a_record_says_what_made_it():
    made = provenance(torch.device("cpu"))
    assert {"versions", "device", "threads", "command", "date"} <= set(made) <= set(KEYS)
    libraries = {"python", "clearhead", "torch", "transformers", "tokenizers", "numpy"}
    assert libraries | {"safetensors"} <= set(made["versions"])
    assert made["device"] == f"cpu, {made['threads']} threads"
    assert made["date"].endswith("+00:00")


def test_a_source_in_words():
    assert source_of({"commit": "abc", "dirty": True}) == "commit abc, with changes"
    assert source_of({"commit": "abc"}) == "commit abc"
    assert source_of({"versions": {}}) == ""
