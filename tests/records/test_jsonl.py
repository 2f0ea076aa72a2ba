"""JSON lines: torn ends, damaged lines, files that vanish."""

import pytest

from clearhead.errors import ClearheadError
from clearhead.records import jsonl


def write_steps(path, steps):
    path.write_text("".join(jsonl.encode({"step": step, "loss": 0.1 * step}) for step in steps))


def steps_of(records):
    return [record["step"] for record in records]


def test_steps_end_where_asked_and_a_torn_last_one_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 1, 2, 2, 3])  # several lines a step are none too many
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert steps_of(jsonl.steps(path)) == [1, 1, 2, 2, 3]
    assert steps_of(jsonl.steps(path, until=2)) == [1, 1, 2, 2]
    assert jsonl.steps(tmp_path / "none.jsonl") == []


def test_a_damaged_step_is_refused_by_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 31))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"{", b"[", 1))
    with pytest.raises(ClearheadError, match=r"metrics\.jsonl, line 1: not a record: Expecting"):
        jsonl.steps(path)
    path.write_text("[]\n")
    with pytest.raises(ClearheadError, match=r"line 1: not a record: .*found list"):
        jsonl.steps(path)
    path.write_bytes(whole.replace(b"\n", b"", 1))  # two lines in one
    with pytest.raises(ClearheadError, match="line 1: not a record: Extra data"):
        jsonl.steps(path)


def test_a_strict_reader_names_file_and_line(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n\n{"b"\n{"c": 3}\n')
    with pytest.raises(ClearheadError, match=r"records\.jsonl, line 3: not a record: Expecting"):
        jsonl.read(path)
    with pytest.raises(ClearheadError, match="cannot read"):
        jsonl.read(tmp_path / "missing")
    path.write_bytes(b'{"a": 1}\n' + b"[" * 100_000 + b"\n{}\n")
    with pytest.raises(ClearheadError, match="line 2: not a record"):
        jsonl.read(path)


def test_separators_inside_a_text_end_no_line(tmp_path):
    path = tmp_path / "records.jsonl"
    texts = ["a\u2028b", "a\x85b", "a\nb", "a\rb"]
    for text in texts:
        jsonl.append(path, {"text": text})
    assert [record["text"] for record in jsonl.read(path)] == texts


def test_append_drops_a_torn_end_and_a_full_disk_is_named(tmp_path, room):
    path = tmp_path / "deep" / "records.jsonl"
    jsonl.append(path, {"a": 1})
    with room(12), pytest.raises(ClearheadError, match=r"cannot write .*records\.jsonl \(File too"):
        jsonl.append(path, {"b": 2})
    assert jsonl.read(path) == [{"a": 1}]
    jsonl.append(path, {"b": 2})
    assert jsonl.read(path) == [{"a": 1}, {"b": 2}]


def test_a_file_of_something_else_is_no_torn_record(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"my notes")
    with pytest.raises(ClearheadError, match="line 1: not a record"):
        jsonl.read(path)
    jsonl.append(path, {"a": 1})
    assert path.read_bytes() == b'my notes\n{"a": 1}\n'
    path.write_bytes(b'{"a": 1}\n\0\0\0')  # as a power cut leaves it
    jsonl.append(path, {"b": 2})
    assert jsonl.read(path) == [{"a": 1}, {"b": 2}]
