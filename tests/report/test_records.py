"""Writing and reading records: what survives an interruption, and what is refused."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.records.jsonl import append
from clearhead.report import load, page_of

from .conftest import write_records

RUN = {"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0, "size": "tiny", "label": ""}
Fake = Callable[..., Path]


def measure(value: float | None, **rest: object) -> dict[str, object]:
    return {"kind": "measure", "run": "a/seed0", "metric": "perplexity", "value": value, **rest}


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    append(path, RUN)
    append(path, measure(3.5, length=256))
    append(path, measure(4.5, length=512))
    append(path, measure(9.0))
    records = load(path)
    assert records.arms() == ["a"]
    assert records.values("a", "perplexity", length=256) == {0: 3.5}
    assert records.values("a", "perplexity") == {0: 9.0}
    assert records.values("a", "perplexity", length=1024) == {}
    assert records.dimension("perplexity", "length") == [256, 512]


def test_numbers_that_are_not_finite_become_null_with_a_reason(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, RUN)
    append(path, measure(math.nan, length=256))
    append(path, measure(None, length=512, reason="learned positions end at 256"))
    append(path, {"kind": "step", "run": "a/seed0", "step": 1, "loss": np.float32("inf")})
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    records = load(path)
    assert records.values("a", "perplexity", length=256) == {}
    assert records.reason("a", "perplexity", length=256) == "value was nan"
    assert records.reason("a", "perplexity", length=512) == "learned positions end at 256"
    assert records.runs[0].steps[0]["loss"] is None
    assert records.runs[0].steps[0]["reason"] == "loss was inf"


def test_arrays_and_paths_are_written_as_json(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, {**RUN, "train": {"cache": Path("x"), "betas": (0.9, np.float64(0.95))}})
    assert json.loads(path.read_text())["train"] == {"cache": "x", "betas": [0.9, 0.95]}


def test_a_torn_last_line_is_skipped_and_mended(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, RUN)
    append(path, measure(3.5))
    whole = path.read_bytes()
    for cut in range(1, len(json.dumps(measure(3.5)))):
        path.write_bytes(whole[:-cut])
        load(path)
        append(path, measure(4.5))
        assert load(path).values("a", "perplexity") == {0: 4.5}


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b'{"kind": "measure"}',
        b'{"run": "a/seed0"}',
        b'{"kind": "run", "run": "x", "study": "diagnoses"}',
        b'{"kind": "mesure", "run": "a/seed0"}',
        b'{"kind": "measure", "run": "a/seed0", "metric": "loss", "value": "many"}',
        b'{"kind": "step", "run": "other/seed0", "step": 1}',
        b"\xff\xfe",
    ],
)
def test_garbage_in_the_middle_names_file_and_line(tmp_path, line):
    path = tmp_path / "records.jsonl"
    append(path, RUN)
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(measure(1.0)).encode() + b"\n")
    with pytest.raises(ClearheadError, match=r"records\.jsonl, line 2") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_record_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="cannot read"):
        load(tmp_path / "missing")
    assert load([]).arms() == []


def test_a_resumed_run_overwrites_the_steps_it_repeats(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, RUN)
    for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0)):
        append(path, {"kind": "step", "run": "a/seed0", "step": step, "loss": loss})
    append(path, RUN)
    for step, loss in ((2, 8.5), (3, 7.5)):
        append(path, {"kind": "step", "run": "a/seed0", "step": step, "loss": loss})
    assert [step["loss"] for step in load(path).runs[0].steps] == [9.0, 8.5, 7.5]


def test_two_files_may_use_the_same_run_names(fake):
    now = fake("now.jsonl", steps=3)
    old = fake("old.jsonl", steps=5, label="committed record", seeds=2)
    records = load([old, now])
    assert records.labels() == ["", "committed record"]
    assert len(records.labelled("").runs) == 3
    assert len(records.labelled("committed record").of("softmax1")) == 2
    assert len(records.labelled("").of("softmax1")[0].steps) == 3


def test_two_comparisons_of_the_same_arms_under_other_settings_are_both_shown(tmp_path):
    paths = [tmp_path / name / "records.jsonl" for name in ("short", "long")]
    for path, steps in zip(paths, (3, 5), strict=True):
        write_records(path, steps=steps)
    records = load(paths)
    assert records.labels() == ["short", "long"]
    assert [len(records.labelled(one).runs[0].steps) for one in records.labels()] == [3, 5]
    assert re.match(r"Validation perplexity: Short: .*\. Long: ", page_of(records).verdict[0])
    again = write_records(tmp_path / "again.jsonl", steps=3)
    assert load([paths[0], again]).labels() == [""]  # the same training: the later counts


def test_the_baseline_comes_first(fake):
    path = fake(presets=("softmax1", "transformer"), steps=1)
    assert load(path).arms() == ["transformer", "softmax1"]


def test_two_sizes_under_one_label_are_refused(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, RUN)
    append(path, {**RUN, "run": "a/seed1", "seed": 1, "size": "small"})
    with pytest.raises(ClearheadError, match="sizes"):
        load(path)
