"""Records read into one model, and into one table; the source that made a record."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead
from clearhead.errors import ClearheadError
from clearhead.records.jsonl import append
from clearhead.records.loading import Store, load, parse
from clearhead.records.provenance import KEYS, provenance, source_of
from clearhead.records.runs import DIAGNOSIS, DIMENSIONS, Measure, Records, added


def test_a_dimension_that_is_absent_pools_and_validation_is_the_split_of_default():
    lines = [
        {"kind": "run", "run": "a", "preset": "a", "seed": 0},
        {"kind": "measure", "run": "a", "metric": "m", "value": 1, "split": "validation"},
        {"kind": "measure", "run": "a", "metric": "m", "value": 2, "layer": 0, "note": "x"},
        {"kind": "measure", "run": "a", "metric": "m", "value": 3, "layer": 1, "map": None},
    ]
    (run,) = parse(lines).runs
    assert run.value("m") == run.value("m", split="validation", layer=None) == 1
    assert [one.value for one in run.select("m")] == [1, 2, 3]
    assert run.measure("m", layer=0) == Measure(
        metric="m", value=2.0, dimensions={"layer": 0}, details={"note": "x"}
    )
    assert run.value("m", layer=2) is None


TRAINED = {"preset": "a", "seed": 0}
EVALUATED = {**TRAINED, "weights": "w"}
TEXT = {"length": 8, "tokens": 64, "data": {"fingerprint": "x"}}
QUANTIZED = {"study": "quantization", "weights": "w", **TEXT}


@pytest.mark.parametrize(
    ("header", "changes", "kept"),
    [
        *((header, {"date": "later"}, True) for header in (TRAINED, EVALUATED, QUANTIZED)),
        (EVALUATED, {"weights": None}, True),
        *((header, {"weights": "v"}, False) for header in (EVALUATED, QUANTIZED)),
        (QUANTIZED, {"tokens": 128}, False),  # what schemes add is a difference on one text
        (QUANTIZED, {"length": 16}, False),
        (QUANTIZED, {"data": {"fingerprint": "y"}}, False),
    ],
)
def test_a_resumed_run_keeps_its_numbers_and_another_model_or_text_replaces_them(
    header, changes, kept
):
    first = {"kind": "run", "run": "a-seed3", **header}
    measure = {"kind": "measure", "run": "a-seed3", "metric": "m", "value": 1}
    (run,) = parse([first, measure, {**first, **changes}]).runs
    assert run.value("m") == (1.0 if kept else None)
    assert (run.arm, run.seed) == ("a", header.get("seed", 3))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_numbers_of_draws_are_no_trials(value):
    """Of two draws that answer nothing, or all, the spread is unknown: they are many questions."""
    header = {"kind": "run", "run": "a", "preset": "a", "seed": 0}
    line = {"kind": "measure", "run": "a", "metric": "exact_match", "value": value}
    (run,) = parse([header, *({**line, "draw": draw} for draw in (0, 1))]).runs
    found = run.measure("exact_match")
    assert (found.value, found.details.get("interval")) == (value, None)


def test_a_scheme_that_changes_nothing_adds_nothing_in_every_window():
    items = (8.0, 9.0, 10.0)
    full = Measure(metric="perplexity", value=9.0, details={"items": items})
    drawn = [replace(full, draws=dict.fromkeys((0, 1), full))] * 2
    for scheme, other in ((full, full), drawn):
        found = added(scheme, other)
        assert (found.value, found.details.get("interval")) == (0.0, None)


def test_the_arm_of_an_evaluated_run_is_its_name_without_its_seed():
    def evaluated(name: str, seed: int) -> list[dict[str, Any]]:
        header = {"kind": "run", "run": name, "preset": "transformer", "seed": seed}
        measure = {"kind": "measure", "run": name, "metric": "m", "value": float(seed)}
        return [{**header, "evaluation": {}}, measure]

    seeds = parse([*evaluated("a/seed0", 0), *evaluated("a-seed1", 1)])
    assert seeds.values("a", "m") == {0: 0.0, 1: 1.0}
    others = parse([*evaluated("a", 0), *evaluated("b", 1)])
    assert others.arms() == ["a", "b"]
    assert [run.preset for run in others.runs] == ["transformer", "transformer"]


def test_an_evaluation_of_a_run_beside_the_runs_own_records_adds_to_them(tmp_path):
    """`compare` and `eval` write a file each: the first names arm and size, the second neither."""
    train = {"tokens": 1000, "seed": 0}
    run = {"run": "sas norm=none/seed0"}
    header = {"kind": "run", **run, "preset": "sas", "seed": 0, "train": train}
    trained = [
        {**header, "arm": "sas norm=none", "size": "tiny"},
        {"kind": "measure", **run, "metric": "loss", "value": 3.0},
    ]
    evaluated = [
        {**header, "size": "", "evaluation": {}, "label": ""},
        {"kind": "measure", **run, "metric": "accuracy", "task": "a", "value": 0.5},
    ]
    other = [{**evaluated[0], "train": {**train, "tokens": 2000}}, evaluated[1]]
    files = [tmp_path / name for name in ("trained", "evaluated", "other")]
    for file, lines in zip(files, (trained, evaluated, other), strict=True):
        append(file, *lines)
    for order in (files[:2], files[1::-1]):
        (found,) = load(order).runs
        assert (found.arm, found.header["size"]) == ("sas norm=none", "tiny")
        assert (found.value("loss"), found.value("accuracy", task="a")) == (3.0, 0.5)
    with pytest.raises(ClearheadError, match="report these files apart"):
        load([files[0], files[2]])  # a run of that name, trained for longer


@pytest.mark.parametrize("setting", [{"weights": "b"}, {"evaluation": {"split": "all"}}])
def test_two_evaluations_of_one_name_add_up_or_are_told_apart(tmp_path, setting):
    header = {"kind": "run", "run": "a", "preset": "a", "seed": 0, "weights": "a", "evaluation": {}}

    def write(name: str, metric: str, **changes: Any) -> Path:
        measure = {"kind": "measure", "run": "a", "metric": metric, "value": 1.0}
        append(tmp_path / name, {**header, **changes}, measure)
        return tmp_path / name

    one = write("one", "m")
    (run,) = load([one, write("two", "n")]).runs
    assert (run.value("m"), run.value("n")) == (1.0, 1.0)
    assert load([one, write("other", "m", **setting)]).labels() == ["one", "other"]
    other = write("third", "k", evaluation={"tasks": ["k"]}, data={"fingerprint": "b"})
    (run,) = load([one, other]).runs
    assert (run.value("m"), run.value("k")) == (1.0, 1.0)


def test_two_diagnoses_of_one_name_are_refused(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text('{"kind": "run", "study": "diagnosis", "run": "x"}\n')
    with pytest.raises(ClearheadError, match="a second diagnosis named 'x'"):
        load([tmp_path / "one", tmp_path / "two"])


@pytest.mark.parametrize("details", [{"interval": 3}, {"items": [[1]]}])
def test_errors_of_a_measure_that_are_no_numbers_are_refused(details):
    header = {"kind": "run", "run": "a", "preset": "a", "seed": 0}
    line = {"kind": "measure", "run": "a", "metric": "m", "value": 1.0}
    with pytest.raises((ValueError, TypeError)):
        parse([header, {**line, **details}])
    (run,) = parse([header, {**line, "items": [1.0, None], "interval": [0.5, 1.5]}]).runs
    found = run.measure("m")
    assert found.details == {"interval": [0.5, 1.5]}


def test_each_number_is_a_row_with_its_run_and_dimensions():
    head = {"run": "sas/seed1", "arm": "sas", "preset": "sas", "seed": 1, "label": "6 layers"}
    one = {"kind": "measure", "run": "sas/seed1", "metric": "loss"}
    lines = [{**one, "length": 8, "value": 2.5}, {**one, "step": 5, "value": None}]
    table = parse([{"kind": "run", **head}, *lines]).frame()
    assert [*table.columns[-len(DIMENSIONS) :]] == [*DIMENSIONS]
    first, second = (row for _, row in table.iterrows())
    named = ["label", "run", "arm", "seed", "metric", "value", "length"]
    assert [*first[named]] == ["6 layers", "sas/seed1", "sas", 1, "loss", 2.5, 8]
    assert (second["step"], second.isna()["value"], second.isna()["length"]) == (5, True, True)
    assert len(Records(runs=()).frame()) == 0


HEADER = {"run": "a/seed0", "preset": "a", "seed": 0}
ROWS = ({"metric": "loss", "value": 3.5, "length": 8}, {"metric": "loss", "value": 4.0})


def test_a_result_is_known_to_the_next_store_and_its_header_is_written_once(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    store = Store(path)
    lines = store.add("one", HEADER, ROWS, task="loss")
    store.add("two", HEADER, [{"metric": "kurtosis", "value": 2.0}], task="states")
    assert path.read_text("utf-8").count('"kind": "run"') == 1
    again = Store(path)
    assert again.has("one", HEADER)
    assert not again.has("one", {**HEADER, "run": "b"})
    assert not again.has("three", HEADER)
    assert again.rows("one", HEADER) == lines
    assert [line["kind"] for line in lines] == ["measure", "measure", "cell"]
    for kept in (store, again):
        assert kept.records().values("a", "loss") == {0: 4.0}
        assert kept.records().values("a", "loss", length=8) == {0: 3.5}
    memory = Store(None)
    memory.add("one", HEADER, ROWS)
    assert memory.records().values("a", "loss") == {0: 4.0}


def test_a_kill_at_any_byte_loses_at_most_the_result_being_written(tmp_path):
    path = tmp_path / "records.jsonl"
    Store(path).add("one", HEADER, ROWS, task="loss")
    kept = len(path.read_bytes())
    Store(path).add("two", HEADER, [{"metric": "kurtosis", "value": 2.0}], task="states")
    whole = path.read_bytes()
    for end in range(kept, len(whole), 7):
        path.write_bytes(whole[:end])
        store = Store(path)
        assert store.has("one", HEADER)
        done = store.has("two", HEADER)
        assert done == (end == len(whole) - 1)  # all but the newline
        assert store.records().values("a", "kurtosis") == ({0: 2.0} if done else {})
        store.add("two", HEADER, [{"metric": "kurtosis", "value": 3.0}], task="states")
        (run,) = load(path).runs
        assert (run.value("kurtosis"), run.value("loss")) == (3.0, 4.0)


def test_a_result_under_other_settings_takes_the_place_of_the_first(tmp_path):
    store = Store(tmp_path / "records.jsonl")
    store.add("one", HEADER, ROWS, task="loss", at={"length": 8})
    store.add("two", HEADER, ROWS[:1], task="loss", at={"length": 8})
    again = Store(tmp_path / "records.jsonl")
    assert not again.has("one", HEADER)
    assert again.has("two", HEADER)
    assert again.records().values("a", "loss") == {}


def test_a_result_of_other_weights_is_not_known(tmp_path):
    path = tmp_path / "records.jsonl"
    one, two = ({**HEADER, "weights": name} for name in ("one", "two"))
    Store(path).add("cell", one, ROWS)
    assert Store(path).has("cell", one)
    assert not Store(path).has("cell", two)
    Store(path).add("other", two, ROWS)
    assert not Store(path).has("cell", one)


def test_other_studies_and_damaged_lines_are_refused_by_name(tmp_path):
    path = tmp_path / "records.jsonl"
    Store(path).add("one", HEADER, ROWS)
    with pytest.raises(ClearheadError, match=r"holds records of another study \(comparison\)"):
        Store(path, DIAGNOSIS)
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 2).replace(b"[", b"{", 1))
    with pytest.raises(ClearheadError, match=r"records\.jsonl, line 2: not a record"):
        Store(path)


SOURCE = Path(clearhead.__file__).parent
ASK = "import json; from clearhead.records.provenance import source; print(json.dumps(source()))"
NEEDED = ("__init__.py", "versions.py", "errors.py", "terminal.py", "records")


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.check_output(["git", *identity, *words], cwd=folder, text=True).strip()


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
    place = {"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin", "GIT_DIR": "/nowhere"}
    return json.loads(subprocess.check_output([sys.executable, "-B", "-c", ASK], env=place))


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
