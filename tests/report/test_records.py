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
from clearhead.records.loading import parse
from clearhead.report import load, page_of

from .conftest import write_records

RUN = {"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0, "size": "tiny", "label": ""}
Fake = Callable[..., Path]


def measure(value: float | None, **rest: object) -> dict[str, object]:
    return {"kind": "measure", "run": "a/seed0", "metric": "perplexity", "value": value, **rest}


def test_numbers_that_are_not_finite_become_null_with_a_reason(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    append(path, RUN, measure(math.nan, length=256), measure(9.0))
    append(path, measure(None, length=512, reason="learned positions end at 256"))
    append(path, {"kind": "step", "run": "a/seed0", "step": 1, "loss": np.float32("inf")})
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    records = load(path)
    assert records.values("a", "perplexity") == {0: 9.0}
    assert records.values("a", "perplexity", length=256) == {}
    assert records.dimension("perplexity", "length") == [256, 512]
    reasons = [one.reason for one in records.runs[0].select("perplexity") if one.dimensions]
    assert reasons == ["value was nan", "learned positions end at 256"]
    assert records.runs[0].steps[0]["loss"] is None
    assert records.runs[0].steps[0]["reason"] == "loss was inf"


def test_arrays_and_paths_are_written_as_json(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, {**RUN, "train": {"cache": Path("x"), "betas": (0.9, np.float64(0.95))}})
    assert json.loads(path.read_text())["train"] == {"cache": "x", "betas": [0.9, 0.95]}


def test_a_resumed_run_overwrites_the_steps_it_repeats():
    step = {"kind": "step", "run": "a/seed0"}
    losses = (RUN, (1, 9.0), (2, 8.0), (3, 7.0), RUN, (2, 8.5), (3, 7.5))
    lines = (one if one is RUN else {**step, "step": one[0], "loss": one[1]} for one in losses)
    assert [step["loss"] for step in parse(lines).runs[0].steps] == [9.0, 8.5, 7.5]


def test_two_files_may_use_the_same_run_names_and_the_baseline_comes_first(fake):
    now = fake("now.jsonl", steps=3, presets=("softmax1", "transformer"))
    old = fake("old.jsonl", steps=5, label="committed record", seeds=2)
    records = load([old, now])
    assert records.labels() == ["", "committed record"]
    assert load(now).arms() == ["transformer", "softmax1"]
    assert len(records.labelled("").runs) == 2
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


def test_two_sizes_under_one_label_are_refused():
    with pytest.raises(ClearheadError, match="sizes"):
        parse([RUN, {**RUN, "run": "a/seed1", "seed": 1, "size": "small"}])
