"""Checksums of a saved model's folder."""

import shutil

import pytest

from clearhead.errors import ClearheadError
from clearhead.records import manifest


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
