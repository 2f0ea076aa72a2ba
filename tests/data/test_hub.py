"""Hub data without a network: a stand-in for the stream, and a local folder through datasets."""

import json

import pytest

from clearhead.data import prepare
from clearhead.data.hub import parse_hub
from clearhead.errors import ClearheadError


def test_spec():
    assert parse_hub("hf:org/name") == ("org/name", None, "train")
    assert parse_hub("hf:org/name:config#test") == ("org/name", "config", "test")
    with pytest.raises(ClearheadError, match="no name"):
        parse_hub("hf:")


def test_downloaded_once_up_to_the_limit(configure, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked, given = [], []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options["split"]))
        assert options["streaming"]
        for number in range(1000):
            given.append(number)
            yield {"body": f"{number:010}"}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = configure("hf:org/name:small#test", text_field="body", limit=200)
    corpus = prepare(config)
    again = prepare(config)
    assert asked == [("org/name", "small", "test")]
    assert len(given) == 20
    assert corpus.describe()["documents"] == 20
    assert again.fingerprint == corpus.fingerprint


def test_interrupted_download_leaves_nothing(configure, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments, **options):
        yield {"text": "first"}
        raise ConnectionError("the line\nwent down")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = configure("hf:org/name")
    with pytest.raises(ClearheadError, match="cannot be had from the hub: the line went down"):
        prepare(config)
    assert list((config.cache / "hub").iterdir()) == []


def test_missing_field_names_the_fields(configure, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: [{"body": "x", "label": 1}])
    with pytest.raises(ClearheadError, match="row 1: no field 'text', it has 'body', 'label'"):
        prepare(configure("hf:org/name"))


def test_the_real_library_streams_a_folder(configure, tmp_path):
    pytest.importorskip("datasets")
    root = tmp_path / "set"
    root.mkdir()
    (root / "train.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(20))
    )
    assert prepare(configure(f"hf:{root}")).describe()["documents"] == 20
    with pytest.raises(ClearheadError, match=r"cannot be had from the hub: .*nosplit"):
        prepare(configure(f"hf:{root}#nosplit"))
