"""Records with values of other types: refused in one line where they are read, or only shown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.records.loading import trusted
from clearhead.report import load, page_of

RESULTS = Path(__file__).parents[2] / "results"
WRONG = ("x", -3, [1], {"a": {}})
# Of objects in a header, the values that pages read; all others are only shown.
INNER = {
    "data": ("tokenizer",),
    "tokenizer": ("vocabulary",),
    "model": ("vocab_size",),
    "train": ("tokens", "sequence_length"),
}


def first_run(name: str) -> list[dict[str, Any]]:
    """The header of a file's first run, and its first line of each kind and metric."""
    lines = [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]
    mine = [line for line in lines if line["run"] == lines[0]["run"]]
    return list({(line["kind"], line.get("metric")): line for line in reversed(mine)}.values())[
        ::-1
    ]


def damaged(line: dict[str, Any], *keys: str) -> Iterator[dict[str, Any]]:
    """The line with each of its values (of these keys), or of some in them, of other types."""
    for key in keys or line:
        yield from ({**line, key: wrong} for wrong in WRONG)
    for key, inner in INNER.items():
        if isinstance(line.get(key), dict):
            yield from ({**line, key: one} for one in damaged(line[key], *inner))


def read(path: Path, lines: list[dict[str, Any]]) -> str:
    """The refusal of these lines; "" where they make a page."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    try:
        with trusted(path):
            page_of(load(path))
    except ClearheadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["encoders.jsonl", "smollm2-bits.jsonl", "quantization.jsonl", "backcopy.jsonl"]
)
def test_a_header_of_wrong_types_is_refused_in_a_line_or_makes_a_page(tmp_path, name):
    header, *lines = first_run(name)
    kept = [line for line in lines if line["kind"] == "measure"][:1]
    found = [read(tmp_path / "records", [one, *kept]) for one in damaged(header)]
    refused = [line for line in found if line]
    assert len(refused) > 10
    assert not [line for line in refused if "\n" in line]


LINES = (
    {"kind": "measure", "metric": "perplexity", "value": "many", "length": 8},
    {"kind": "measure", "metric": "perplexity", "value": 1, "length": [8]},
    {"kind": "measure"},
    {"kind": "mesure"},
    {"kind": "step", "step": "1", "loss": 2.0},
    {"kind": "step", "run": "other", "step": 1},
    {"kind": "cell", "cell": "a-0", "lines": "1", "task": "passkey", "at": {}},
    {"kind": "run", "study": "diagnoses"},
    {"kind": None},
)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_wrong_types_is_refused_in_a_line_that_names_the_file(tmp_path, line):
    header = {"kind": "run", "run": "a", "preset": "a", "seed": 0}
    steps = [{"kind": "step", "run": "a", "step": n, "loss": 1.0} for n in (1, 2)]
    refused = read(tmp_path / "records", [header, *steps, {"run": "a", **line}])
    assert f"{tmp_path}/records" in refused
    assert "\n" not in refused
