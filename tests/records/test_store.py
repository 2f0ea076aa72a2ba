"""Results that are kept one by one: which count after a kill, and what is refused."""

import pytest

from clearhead.errors import ClearheadError
from clearhead.records.loading import Store, load
from clearhead.records.runs import DIAGNOSIS

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
