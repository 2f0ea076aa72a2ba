"""Records with values of other types: refused in one line where they are read, or only shown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import ClearheadError
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

CELL = {"kind": "cell", "cell": "a-0", "lines": 1, "task": "passkey"}
CELL |= {"at": {}, "options": {}, "made": {}}


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
        page_of(load(path))
    except ClearheadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["encoders.jsonl", "smollm2-bits.jsonl", "quantization.jsonl", "backcopy.jsonl"]
)
def test_a_header_of_wrong_types_is_refused_in_a_line_or_makes_a_page(
    tmp_path: Path, name: str
) -> None:
    header, *lines = first_run(name)
    kept = [line for line in lines if line["kind"] == "measure"][:1]
    found = [read(tmp_path / "records", [one, *kept]) for one in damaged(header)]
    refused = [line for line in found if line]
    assert len(refused) > 30
    assert not [line for line in refused if "\n" in line]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"kind": "measure", "metric": "kurtosis", "value": 1, "layer": "x"}, "layer is 'x', not"),
        ({"kind": "measure", "metric": "perplexity", "value": 1, "length": -3}, "length is -3"),
        ({"kind": "measure", "metric": "perplexity", "value": 1, "unused": 3}, "a list, each"),
        ({"kind": "curve", "curve": "spectrum", "x": [1], "y": ["a"]}, "y is ['a'], not a list"),
        ({"kind": "curve", "curve": "spectrum", "x": [1]}, "lacks 'y'"),
        ({"kind": "advice", "advice": "do", "finding": "found"}, "lacks"),
        ({"kind": "note", "part": 1, "reason": "none"}, "part is 1, not a text"),
        ({"kind": "step", "step": 1, "loss": [2]}, "loss is [2], not a finite number"),
        ({**CELL, "at": 1}, "an object"),
        ({**CELL, "lines": "1"}, "lines is '1'"),
    ],
)
def test_a_line_of_wrong_types_is_named(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    header = {"kind": "run", "run": "a", "preset": "a", "seed": 0}
    refused = read(tmp_path / "records", [header, {"run": "a", **line}])
    assert f"{tmp_path}/records, line 2: not a record: " in refused
    assert said in refused
