"""tools/migrate_records.py: each older form of records in the present one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.records.loading import load, parse

SCRIPT = Path(__file__).parents[2] / "tools" / "migrate_records.py"
_spec = importlib.util.spec_from_file_location("migrate_records", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
migrate_records = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(migrate_records)

MADE = {"weights": "w", "data": None, "splits": [], "tokens": 8, "dtype": "float32", "seed": 1}
HEADER = {"kind": "run", "run": "a", "preset": "a", "seed": 0}
SCHEME = {"kind": "scheme", "run": "a-seed3", "perplexity": 9.5, "unused": [], "reason": None}


def _cell(result: dict[str, Any], *headlines: str) -> dict[str, Any]:
    at = {"length": 8, "factor": None}
    rest = {"headlines": [*headlines], "options": {}, "made": MADE, "result": result}
    return {"kind": "cell", "run": "a", "task": "perplexity", "at": at, **rest}


def test_schemes_of_a_quantisation_are_measures() -> None:
    lines = [
        {"kind": "quantization", "run": "a-seed3", "length": 8},
        {**SCHEME, "scheme": None, "delta": None},
        {**SCHEME, "scheme": "w8", "family": "w", "bits": 8, "delta": 0.5, "accuracy": 0.25},
        {**SCHEME, "scheme": "w3", "perplexity": None, "delta": None, "reason": "no"},
    ]
    (run,) = parse(migrate_records.migrated(lines)).runs
    assert (run.arm, run.seed, run.study) == ("a", 3, "quantization")
    assert run.value("perplexity") == run.value("perplexity", scheme="w8") == 9.5
    assert run.value("added_perplexity", scheme="w8") == 0.5
    assert run.value("accuracy", scheme="w8") == 0.25
    found = run.measure("perplexity", scheme="w3")
    assert found is not None
    assert (found.reason, len(run.measures)) == ("no", 5)


def test_a_cell_with_its_result_is_measures_and_a_closing_line() -> None:
    positions = [{"to": 1, "loss": 9.0, "cumulative": 9.0}, {"to": 8, "loss": 3, "cumulative": 4}]
    result = {"perplexity": 20.0, "loss": 3.0, "stride": 4, "positions": positions}
    lines = [*migrate_records.migrated([HEADER, _cell(result, "perplexity", "lost")])]
    assert [line["kind"] for line in lines] == ["run", "measure", "measure", "cell"]
    (run,) = parse(lines).runs
    found = run.measure("perplexity", task="perplexity", length=8)
    assert found is not None
    assert (found.value, found.details["loss"], found.details["stride"]) == (20.0, 3.0, 4)
    assert run.value("loss", task="perplexity", length=8) is None
    assert run.select("lost")[0].value is None
    (cell,) = run.cells
    assert (cell["made"], cell["lines"], cell["cell"][-2:]) == (MADE, 2, "-1")


def test_documents_of_a_cell_are_measures_on_the_scale_of_the_loss() -> None:
    documents = [
        {"document": "x", "loss": 3.1, "perplexity": 22.2},
        {"document": "y", "loss": 2.9, "perplexity": None},
    ]
    result = {"perplexity": 20.0, "loss": 3.0, "documents": documents}
    (run,) = parse(migrate_records.migrated([HEADER, _cell(result, "perplexity")])).runs
    found = run.measure("perplexity", task="perplexity", length=8)
    assert found is not None
    assert found.details["items"] == pytest.approx([22.0, 18.0])
    assert [one.value for one in run.select("document_perplexity")] == [22.2, None]


def test_a_file_is_migrated_in_place_once(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    lines = [{"kind": "diagnosis", "run": "x"}, _cell({"perplexity": 2.0}, "perplexity")]
    lines[1]["run"] = "x"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ClearheadError, match=r"line 1: .* tools/migrate_records\.py"):
        load(path)
    assert migrate_records.main([str(path)]) == 0
    (run,) = load(path).runs
    assert (run.study, run.value("perplexity", task="perplexity", length=8)) == ("diagnosis", 2.0)
    once = path.read_bytes()
    assert migrate_records.main([str(path)]) == 0
    assert path.read_bytes() == once


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.jsonl"
    assert migrate_records.main([str(path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert migrate_records.main([]) == 2


def test_scores_called_collinear_are_coca(tmp_path):
    path, named = tmp_path / "records.jsonl", {**HEADER, "model": {"scores": "collinear-strict"}}
    path.write_text(json.dumps(named) + "\n")
    assert migrate_records.main([str(path)]) == 0
    assert json.loads(path.read_text())["model"] == {"scores": "coca-strict"}
