"""Whole files and folders, on a full disk too; locks between processes; checksums of models."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from clearhead.errors import ClearheadError
from clearhead.records import jsonl, manifest
from clearhead.records.files import hold_file, hold_folder, publish_folder, read_json, write_json


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path, room):
    path = tmp_path / "run.json"
    write_json(path, {"step": 1})
    with room(10), pytest.raises(ClearheadError, match=r"cannot write .*run\.json \(File too"):
        write_json(path, {"step": 2, "text": "x" * 100})
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["text", "safetensors", "tokenizer"])
def test_a_folder_that_does_not_fit_is_one_line_and_leaves_nothing(tmp_path, room, kind):
    words = {f"word {number}": number for number in range(100)}

    def fill(folder):
        if kind == "text":
            (folder / "config.json").write_text("x" * 1000)
        elif kind == "safetensors":
            save_file({"weight": torch.zeros(1000)}, folder / "model.safetensors")
        else:
            Tokenizer(WordLevel(words, unk_token="word 0")).save(str(folder / "tokenizer.json"))

    target = tmp_path / "deep" / "model"
    with (
        room(100),
        pytest.raises(ClearheadError, match=r"model \(File too large\): make room") as caught,
        publish_folder(target) as folder,
    ):
        fill(folder)
    assert "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []
    with publish_folder(target) as folder:
        fill(folder)
    assert len(list(target.iterdir())) == 1


def test_a_name_that_is_not_utf8_is_kept_by_json_and_manifest(tmp_path):
    name = "caf\udce9"
    folder = tmp_path / name
    folder.mkdir()
    write_json(folder / "run.json", {"path": name})
    assert read_json(folder / "run.json", "")["path"] == name
    manifest.seal(folder, {"of": name})
    assert manifest.verify(folder, name=manifest.FILE, advice="")["of"] == name


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_one_line_that_names_the_file(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ClearheadError, match=r"run\.json is damaged.*: restore it"):
        read_json(path, "restore it")
    with pytest.raises(ClearheadError, match=r"cannot read .*none\.json .*: restore it"):
        read_json(tmp_path / "none.json", "restore it")


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


HOLDER = """
import sys
from pathlib import Path
from clearhead.records.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

FORKING = """
import os, sys, time
from pathlib import Path
from clearhead.records.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder "run" until its input ends."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_in_one_line_that_names_the_owner(holder, tmp_path):
    run = tmp_path / "run"
    owner = f"process {holder.pid} on {socket.gethostname()} since 20"
    said = f"run is in use by {owner}"
    with pytest.raises(ClearheadError, match=said) as caught, hold_folder(run):
        pass
    assert "\n" not in str(caught.value)
    assert [path.name for path in run.iterdir()] == [".lock"]
    holder.communicate("\n")
    assert not run.exists()  # made for the lock, and still empty


def test_a_killed_owners_lock_is_taken_over_reaped_or_not(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    with hold_folder(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_child_of_a_killed_owner_does_not_hold_its_lock(tmp_path):
    """As a data loader's worker, which lives on for a while."""
    words = [sys.executable, "-c", FORKING, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        os.kill(child, 0)  # alive
        with hold_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_what_a_killed_owner_was_writing_is_removed(tmp_path):
    (tmp_path / ".writing-7-records.jsonl").write_text("half a l")
    (tmp_path / ".writing-final").mkdir()
    (tmp_path / "records.jsonl").write_text("whole")
    with hold_folder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "records.jsonl"}


def test_nothing_stays_after_an_error_and_a_file_that_was_written_stays(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    with pytest.raises(ZeroDivisionError), hold_file(path):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with hold_file(path):
        path.write_text("{}\n")
        with pytest.raises(ClearheadError, match="in use"), hold_file(path):
            pass
    assert list(path.parent.iterdir()) == [path]


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path):
    child = -1
    try:
        with hold_folder(tmp_path / "run"):
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert (tmp_path / "run" / ".lock").exists()
    finally:
        if child == 0:  # it has left the block too
            os._exit(0)


@pytest.fixture
def model(tmp_path):
    """A sealed folder."""
    folder = tmp_path / "final"
    (folder / "nested").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "nested/extra.json"):
        (folder / name).write_bytes(bytes(range(100)))
    manifest.seal(folder, {"step": 3})
    return folder


def test_a_whole_folder_passes_wherever_it_lies(model, tmp_path):
    assert manifest.verify(model, advice="")["step"] == 3
    manifest.verify_model(model)
    shutil.copytree(model, tmp_path / "copy")
    model.rename(tmp_path / "renamed")
    for name in ("copy", "renamed"):
        (tmp_path / name / "README.md").write_text("a card")
        (tmp_path / name / ".gitattributes").touch()
        (tmp_path / name / "LICENSE").touch()
        manifest.verify_model(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "nested/extra.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_with_the_remedy(model, name, damage):
    content = bytearray((model / name).read_bytes())
    if damage == "remove":
        (model / name).unlink()
    else:
        content[50] ^= 4
        (model / name).write_bytes(content if damage == "flip" else content[:50])
    with pytest.raises(ClearheadError, match=f"{name} is missing, cut short or changed: restore"):
        manifest.verify_model(model)


def test_a_file_that_a_library_would_read_may_not_be_added(model):
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ClearheadError, match=r"adapter_config\.json was not there when"):
        manifest.verify_model(model)


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"files": {}, "sha256": "0"}'])
def test_a_damaged_manifest_is_named_and_a_missing_one_is_of_an_older_model(model, content):
    (model / manifest.FILE).write_bytes(content)
    with pytest.raises(ClearheadError, match=r"manifest\.json is missing, cut short .* delete"):
        manifest.verify_model(model)
    (model / manifest.FILE).unlink()
    manifest.verify_model(model)
    manifest.verify_model(model.parent / "none")


@pytest.mark.parametrize("put", [lambda path: path.mkdir(), lambda path: path.symlink_to(path)])
def test_something_else_in_a_manifests_place_is_no_missing_manifest(model, put):
    (model / manifest.FILE).unlink()
    put(model / manifest.FILE)
    with pytest.raises(ClearheadError, match=r"manifest\.json is missing, cut short"):
        manifest.verify_model(model)
