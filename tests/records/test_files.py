"""Whole files and folders, on a disk without room too."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from clearhead.errors import ClearheadError
from clearhead.records import manifest
from clearhead.records.files import publish_folder, read_json, write_json


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path, room):
    path = tmp_path / "run.json"
    write_json(path, {"step": 1})
    with room(10), pytest.raises(ClearheadError, match=r"cannot write .*run\.json \(File too"):
        write_json(path, {"step": 2, "text": "x" * 100})
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["text", "safetensors", "tokenizer"])
def test_a_folder_that_does_not_fit_is_one_line_and_leaves_nothing(tmp_path, room, kind):
    """Whoever writes: Rust's libraries raise exceptions of their own."""
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
