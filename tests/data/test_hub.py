"""Hub data without a network: a stand-in for the stream, and a local folder through datasets."""

import json
import os
from types import SimpleNamespace

import pytest

from clearhead.data import GLUE, prepare
from clearhead.data.labelled import labels_of, read_rows
from clearhead.data.tokenizer import train
from clearhead.errors import ClearheadError


class Hub:
    """One data set of 1,000 rows; keeps what was asked of it and how many rows it gave."""

    def __init__(self, lines):
        self.asked, self.given, self.revision, self.fails_at = [], 0, "a1b2", None
        self.lines = lines

    def dataset_info(self, name):
        self.asked.append(("revision of", name))
        return SimpleNamespace(sha=self.revision)

    def load_dataset(self, *arguments, split, streaming, revision):
        assert streaming
        self.asked.append((*arguments, split, revision))
        return self.rows()

    def rows(self):
        """The stream, which breaks at the row `fails_at`."""
        for number in range(1000):
            if number == self.fails_at:
                raise ConnectionError("the line\nwent down")
            self.given += 1
            yield {"body": f"{number:06} {self.lines(number, 2)}"}

    def leave(self):
        """There is no network any more."""
        self.fails_at = 0
        self.dataset_info = self.load_dataset = None


@pytest.fixture
def tokenizer(lines, tmp_path):
    """The folder of a tokenizer."""
    train([lines(seed) for seed in range(20)], 280).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def hub(monkeypatch, lines):
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    hub = Hub(lines)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: hub.load_dataset(*a, **o))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name: hub.dataset_info(name)
    )
    return hub


def test_it_is_streamed_at_one_revision_up_to_the_limit_and_no_text_is_kept(
    configure, hub, tokenizer
):
    options = {"text_field": "body", "limit": 2000, "tokenizer": tokenizer}
    config = configure("hf:org/name:small#test", **options)
    corpus = prepare(config)
    passes = [("org/name", "small", "test", "a1b2")] * 2  # scanned, then tokenised
    assert hub.asked == [("revision of", "org/name"), *passes]
    assert hub.given == 2 * corpus.describe()["documents"] < 100
    assert corpus.describe()["sources"][0]["revision"] == "a1b2"
    kept = (path.read_bytes() for path in config.cache.rglob("*") if path.is_file())
    assert not any(b"000001 " in content for content in kept)
    hub.revision = "c3d4"
    prepare(configure("hf:org/name:small#test", **options | {"limit": 1000}))
    assert hub.asked[3:] == passes


def test_what_is_tokenised_has_the_tokens_of_a_file_and_needs_no_network(configure, hub, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in hub.rows()))
    config = configure("hf:org/name", text_field="body", limit=20_000)
    corpus = prepare(config)
    assert prepare(configure(path, text_field="body", limit=20_000)).fingerprint == (
        corpus.fingerprint
    )
    hub.leave()
    said = []
    assert prepare(config, progress=said.append).fingerprint == corpus.fingerprint
    assert "unchanged since it was read" in said[0]
    with pytest.raises(ClearheadError):
        prepare(configure("hf:org/name", text_field="body", limit=10_000))


def test_classes_are_given_by_name(hub, tmp_path):
    import datasets

    class Stream(list):
        features = {"label": datasets.ClassLabel(names=["not_entailment", "entailment"])}  # noqa: RUF012

    rows = [{"sentence1": "x", "sentence2": "y", "label": label} for label in (1, -1)]
    hub.rows, task = lambda: Stream(rows), GLUE["wnli"]
    found = read_rows(task.train, task, cache=tmp_path, progress=print)
    assert hub.asked[1] == ("nyu-mll/glue", "wnli", "train", "a1b2")
    assert [row.label for row in found] == ["entailment", -1]
    with pytest.raises(ClearheadError, match=r"glue:wnli#train, row 2: label -1 is outside"):
        labels_of(found, task.classes, task)


@pytest.mark.parametrize("second", [False, True])
def test_a_stream_that_breaks_leaves_nothing(configure, hub, second):
    config, rows = configure("hf:org/name", text_field="body"), hub.rows

    def breaks():
        if len(hub.asked) == 2 + second:
            hub.fails_at = 500
        return rows()

    hub.rows = breaks
    with pytest.raises(
        ClearheadError, match=r"'hf:org/name' cannot be loaded .* the line went down"
    ):
        prepare(config)
    hub.fails_at = None
    assert prepare(config).describe()["documents"] == 1000


def test_a_hub_that_does_not_answer_and_a_missing_field_are_one_line(configure, hub):
    answer, hub.dataset_info = hub.dataset_info, {}.__getitem__
    with pytest.raises(ClearheadError, match="cannot be loaded from the hub: 'org/name'"):
        prepare(configure("hf:org/name"))
    hub.dataset_info, hub.rows = answer, lambda: iter([{"body": "x", "label": 1}])
    with pytest.raises(ClearheadError, match="row 1: no field 'text', it has 'body', 'label'"):
        prepare(configure("hf:org/name"))
    with pytest.raises(ClearheadError, match="'hf:': no name; write hf:NAME"):
        prepare(configure("hf:"))


def test_the_real_library_streams_a_folder(configure, tmp_path):
    pytest.importorskip("datasets")
    root = tmp_path / "set"
    root.mkdir()
    path = root / "train.jsonl"

    def write(count):
        rows = (json.dumps({"text": f"row {number}"}) + "\n" for number in range(count))
        path.write_text("".join(rows))
        os.utime(path, (1e9, 1e9))

    write(20)
    config = configure(f"hf:{root}")
    assert prepare(config).describe()["documents"] == 20
    assert "revision" not in prepare(config).describe()["sources"][0]
    write(21)
    assert prepare(config).describe()["documents"] == 21
    with pytest.raises(ClearheadError, match=r"cannot be loaded from the hub: .*nosplit"):
        prepare(configure(f"hf:{root}#nosplit"))
