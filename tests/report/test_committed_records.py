"""The records in results/: each says by which code and by which command it was made."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Records
from clearhead.report import page_of
from clearhead.report.pivots import Pivot

from .frozen_numbers import OTHERS, PAGES, differing, shown

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


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def committed(request: pytest.FixtureRequest) -> tuple[Path, list[dict[str, Any]]]:
    """A file of records, and its lines."""
    return request.param, _read(request.param)


@pytest.fixture(scope="module")
def records(committed: tuple[Path, list[dict[str, Any]]]) -> Records:
    """The runs of a file."""
    if committed[0].stem in OTHERS:
        pytest.skip("of another format")
    return load(committed[0])


def test_every_header_names_commit_command_and_configuration(committed):
    assert not _faults(committed[1])


def test_every_committed_file_loads_whole(committed, records):
    lines = committed[1]
    headers = [x for x in lines if x["kind"] == "run"]
    assert {run.id for run in records.runs} == {x["run"] for x in headers}
    numbers = Counter(line["metric"] for line in lines if line["kind"] == "measure")
    measures = [one for run in records.runs for one in run.measures.values()]
    drawn = [draw for one in measures for draw in one.draws.values() or [one]]
    assert Counter(one.metric for one in drawn) == numbers
    kinds = Counter(line["kind"] for line in lines)
    assert sum(len(run.steps) for run in records.runs) == kinds["step"]
    for kind in ("attention", "cell", "curve", "advice"):
        assert sum(len(run.payload(kind)) for run in records.runs) == kinds[kind]


def test_the_numbers_of_a_committed_record_hold(committed, records):
    assert not differing(committed[0].stem, records)


def test_every_commit_is_in_the_history():
    history = _history()
    headers = [f'"kind": "{kind}"' for kind in CONFIGURATION]
    named = {
        (path.name, json.loads(line)["commit"])
        for path in FILES
        for line in path.read_text("utf-8").splitlines()
        if any(one in line for one in headers)
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


def test_the_readme_says_what_a_record_is(committed):
    """The first cell of a row names it; the others say what it holds, and by which command."""
    rows = re.findall(r"^\| (.*?) \| .+ \| .+ \|$", README, re.MULTILINE)
    assert any(f"`{committed[0].name}`" in names for names in rows)


def test_every_record_makes_a_page_with_a_verdict_and_the_frozen_numbers(committed, records):
    page = page_of(records)
    assert shown(page) == PAGES.get(committed[0].stem, shown(page))
    assert page.verdict
    assert page.verdict[0].endswith(".")
    assert page.sections[-1].name == "made"
    assert any(isinstance(block, Pivot) for block in page.blocks())
