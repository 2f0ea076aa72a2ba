"""The records in results/: each says by which code and by which command it was made."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.report import page_of
from clearhead.report.pivots import Pivot

RESULTS = Path(__file__).parents[2] / "results"
# What the header of a record names beside the commit and the command: the configuration, by kind.
CONFIGURATION = {
    "run": ("train", "model", "versions"),
    "diagnosis": ("architecture", "data", "length", "windows", "versions"),
    "quantization": ("class", "data", "length", "tokens", "versions"),
    "bench": ("name", "device", "versions"),
    "learning-rate": ("preset", "size", "data", "learning_rate", "steps", "tokens"),
}
FILES = sorted(RESULTS.glob("*.jsonl"))
README = RESULTS.joinpath("README.md").read_text("utf-8")


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _faults(lines: list[dict[str, Any]]) -> set[str]:
    """What the headers of a file lack, and the runs that have no header."""
    headers = [line for line in lines if line["kind"] in CONFIGURATION]
    known = {header.get("run") for header in headers}
    found = {f"header of {line['run']}" for line in lines if line.get("run") not in known}
    for header in headers:
        if not re.fullmatch(r"[0-9a-f]{40}", header.get("commit", "")):
            found.add("commit")
        if not re.search(r"clearhead|__main__\.py|make gpu-", header.get("command", "")):
            found.add("command")
        kind = header.get("study", header["kind"])
        found |= {name for name in CONFIGURATION[kind] if header.get(name) in (None, "", {})}
        found |= {f"inferred {one}" for one in header.get("inferred", ()) if one not in header}
    return found if headers else found | {"header"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_header_names_commit_command_and_configuration(path: Path) -> None:
    assert not _faults(_read(path))


def test_every_commit_is_in_the_history() -> None:
    """A commit that was never merged names source that nobody can read."""
    history = _history()
    named = {
        (path.name, line["commit"])
        for path in FILES
        for line in _read(path)
        if line["kind"] in CONFIGURATION
    }
    assert not {(name, commit) for name, commit in named if commit not in history}


def _history() -> set[str]:
    """The commits that HEAD descends from; skips where a checkout does not have them all."""
    if not (RESULTS.parent / ".git").exists():
        pytest.skip("no git checkout")
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("a shallow checkout")
    return {*_git("rev-list", "HEAD").split()}


def _git(*words: str) -> str:
    command = ["git", "-C", str(RESULTS), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_readme_says_what_a_record_is(path: Path) -> None:
    """The first cell of a row names it; the others say what it holds, and by which command."""
    rows = re.findall(r"^\| (.*?) \| .+ \| .+ \|$", README, re.MULTILINE)
    assert any(f"`{path.name}`" in names for names in rows)


# Of other formats: times of kernels, and a sweep that no run's file holds.
OTHERS = ("bench", "gpu", "gpu-check", "learning-rates")


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.glob("*.jsonl")) if path.stem not in OTHERS],
    ids=lambda path: path.stem,
)
def test_every_record_makes_a_page_with_a_verdict(path: Path) -> None:
    page = page_of(load(path))
    assert page.verdict
    assert page.verdict[0].endswith(".")
    assert page.sections[-1].name == "made"
    assert any(isinstance(block, Pivot) for block in page.blocks())
