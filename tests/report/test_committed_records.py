"""The records in results/: each says by which code and by which command it was made."""

import json
import re
from pathlib import Path

import pytest

from clearhead.records.loading import load
from clearhead.report import page_of
from clearhead.report.pivots import Pivot

RESULTS = Path(__file__).parents[2] / "results"
HEADERS = ("run", "diagnosis", "quantization", "bench", "learning-rate")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_header_names_commit_command_and_configuration(path: Path) -> None:
    with path.open(encoding="utf-8") as file:
        headers = [line for line in map(json.loads, file) if line["kind"] in HEADERS]
    assert headers
    for header in headers:
        assert re.fullmatch(r"[0-9a-f]{40}", header["commit"])
        assert "clearhead" in header["command"] or "__main__.py" in header["command"]
        if header["kind"] == "run" and "study" not in header:
            assert header["train"]
            assert header["model"]
            assert header["versions"]
        assert set(header.get("inferred", ())) <= set(header)


# Of other formats: times of kernels, and a sweep that no run's file holds.
OTHERS = ("bench", "gpu", "learning-rates")


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
