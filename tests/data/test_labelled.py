"""Labelled texts: rows, classes, tokens, batches; and hub data without a network."""

import gzip
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from clearhead.data import GLUE, LabelledBatches, Task, labelled, prepare
from clearhead.data.labelled import labels_of, read_rows
from clearhead.data.readers import hub_rows
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.errors import ClearheadError

PAIRS = Task(name="pairs", text="a", pair="b")


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="rows.jsonl.gz"):
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return str(tmp_path / name)

    return make


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat and the dog did not"] * 20, 280)


@pytest.fixture(scope="module")
def bert():
    """A tokenizer that puts [CLS] and [SEP] itself."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def _read(source, task=PAIRS):
    return labelled.read_rows(source, task, cache=None, progress=print)


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["no", "yes"], ("no", "yes"), [0, 1]),
        ([10, 2, 2, 7], ("2", "7", "10"), [2, 0, 0, 1]),  # in the order of numbers
        ([1, "2", "1", 2], ("1", "2"), [0, 1, 0, 1]),
    ],
)
def test_rows_and_classes(labels, classes, numbers, write):
    rows = _read(write(*({"a": "x", "b": None, "label": label} for label in labels)))
    assert rows[1][:3] == ("x", "", labels[1])
    assert rows[1].where.endswith("rows.jsonl.gz, line 2")
    assert labelled.classes_of(rows, PAIRS) == classes
    assert labelled.labels_of(rows, classes, PAIRS) == numbers


def test_a_glue_task_takes_names_and_numbers(write):
    task, fields = GLUE["rte"], {"sentence1": "x", "sentence2": "y"}
    rows = _read(write({**fields, "label": "not_entailment"}, {**fields, "label": 0}), task)
    classes = labelled.classes_of(rows, task)
    assert classes == ("entailment", "not_entailment")
    assert labelled.labels_of(rows, classes, task) == [1, 0]
    numbers = GLUE["stsb"]
    assert labelled.classes_of(rows, numbers) == ()
    assert labelled.labels_of([labelled.Row("x", "y", 2, "here")], (), numbers) == [2.0]
    for task, label, message in (
        *((task, one, "is outside the 2 classes") for one in (-1, 2, "maybe", None, 0.5)),
        *((numbers, one, "is no number") for one in ("high", True, math.nan)),
    ):
        with pytest.raises(ClearheadError, match=f"here: label .* {message}"):
            labelled.labels_of([labelled.Row("x", "y", label, "here")], classes, task)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": "x", "bb": "y", "label": 1}], r"no field 'b'.*--pair-field"),
        ([{"a": "x", "b": "y", "labels": 1}], r"no field 'label'.*--label-field"),
        ([{"a": 3, "b": "y", "label": 1}], "holds a int, not a string"),
        ([[1]], "expected a JSON object"),
        ([], "holds no row"),
        ([{"a": "x", "b": "y", "label": "no"}], "have class 'no'"),
        ([{"a": "x", "b": "y", "label": one} for one in (1, "1")], "all 2 .* have class '1'"),
        ([{"a": "x", "b": "y", "label": 0.5}], "a name or a whole number"),
    ],
)
def test_rows_that_do_not_fit(write, rows, message):
    with pytest.raises(ClearheadError, match=message):
        labelled.classes_of(_read(write(*rows)), PAIRS)


def test_files_that_do_not_fit(write, tmp_path):
    (tmp_path / "torn.jsonl").write_text('{"a": "x"')
    for name, message in (
        ("missing.jsonl", "no such file"),
        (write(name="rows.txt"), "no such file of JSON lines"),
        ("torn.jsonl", "line 1: not JSON"),
    ):
        with pytest.raises(ClearheadError, match=message):
            _read(str(tmp_path / name))


def test_our_tokenizer_frames_texts_and_the_longer_one_loses_its_end(tokenizer):
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    words = tokenizer("the cat sat on the mat", add_special_tokens=False)["input_ids"]
    few = tokenizer("the dog", add_special_tokens=False)["input_ids"]
    rows = [labelled.Row("the cat sat on the mat", "the dog", 0, "here")]

    def ids(length):
        return labelled.encode(rows, [0], tokenizer, length=length).inputs[0]["input_ids"]

    assert ids(100) == [begin, *words, end, *few, end]
    room = len(few) + 3 + 3
    assert ids(room) == [begin, *words[:3], end, *few, end]
    assert ids(5) == [begin, words[0], end, few[0], end]
    with pytest.raises(ClearheadError, match="max_length is 4"):
        ids(4)
    swapped = [labelled.Row("the dog", "the cat sat on the mat", 0, "here")]
    made = labelled.encode(swapped, [0], tokenizer, length=room).inputs[0]["input_ids"]
    assert made == [begin, *few, end, *words[:3], end]


def test_a_tokenizer_with_a_template_uses_it(bert):
    rows = [labelled.Row("a b c d e", "f", 0, "here")]
    made = labelled.encode(rows, [0], bert, length=7).inputs[0]
    assert bert.decode(made["input_ids"]) == "[CLS] a b c [SEP] f [SEP]"
    if "token_type_ids" in bert.model_input_names:
        assert made["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1]


def _data(tokenizer, count=10):
    rows = [labelled.Row("the cat " * (i % 4 + 1), None, i % 3, "here") for i in range(count)]
    return labelled.encode(rows, [i % 3 for i in range(count)], tokenizer, length=32)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_to_their_longest(tokenizer, side):
    tokenizer.padding_side = side
    data = _data(tokenizer)
    batches = LabelledBatches(data, tokenizer, batch_size=4, seed=None)
    made = list(batches.epoch())
    assert [len(batch["labels"]) for batch in made] == [4, 4, 2]
    assert torch.cat([batch["labels"] for batch in made]).tolist() == data.labels
    number = 0
    for batch in made:
        assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1]
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert ids[mask == 1].tolist() == data.inputs[number]["input_ids"]
            assert (ids[mask == 0] == tokenizer.pad_token_id).all()
            assert mask[0 if side == "right" else -1] == 1
            number += 1


def test_every_epoch_has_all_texts_in_an_order_of_its_own(tokenizer):
    data = _data(tokenizer, 50)
    data.labels[:] = range(50)
    batches = LabelledBatches(data, tokenizer, batch_size=8, seed=3)
    assert batches.per_epoch == 7
    epochs = [
        [n for i in range(7) for n in batches.batch(7 * epoch + i)["labels"].tolist()]
        for epoch in range(3)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1]
    again, other = (LabelledBatches(data, tokenizer, batch_size=8, seed=seed) for seed in (3, 4))
    assert again.batch(9)["labels"].tolist() == epochs[1][16:24]
    assert other.batch(0)["labels"].tolist() != epochs[0][:8]
    read = [int(batches.batch(step)["attention_mask"].sum()) for step in range(9)]
    assert [batches.tokens_before(step) for step in range(9)] == [
        sum(read[:step]) for step in range(9)
    ]


class Hub:
    """One data set of 1,000 rows; keeps what was asked of it and how many rows it gave."""

    def __init__(self, lines):
        self.asked, self.given, self.revision, self.fails_at = [], 0, "a1b2", None
        self.lines = lines

    def dataset_info(self, name):
        self.asked.append(("revision of", name))
        return SimpleNamespace(sha=self.revision)

    def load_dataset(self, *arguments, split, streaming, revision):
        self.asked.append((*arguments, split, revision))
        self.streaming = streaming
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
def tokenizer_folder(lines, tmp_path):
    train_tokenizer([lines(seed) for seed in range(20)], 280).save_pretrained(
        tmp_path / "tokenizer"
    )
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


def test_a_part_is_streamed_at_one_revision_up_to_the_limit_and_no_text_is_kept(
    configure, hub, tokenizer_folder
):
    options = {"text_field": "body", "limit": 2000, "tokenizer": tokenizer_folder}
    config = configure("hf:org/name:small#test", **options)
    corpus = prepare(config)
    passes = [("org/name", "small", "test", "a1b2")] * 2  # scanned, then tokenised
    assert hub.asked == [("revision of", "org/name"), *passes]
    assert hub.streaming
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
    assert not hub.streaming, "a whole data set is downloaded once"


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


def test_the_real_library_keeps_a_whole_data_set(configure, tmp_path, monkeypatch):
    """A folder stands in for the hub: what is downloaded is read from memory-mapped files."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [{"text": f"row {number}\r\n", "label": number % 2} for number in range(30)]
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(2))
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(tmp_path / "set/train.parquet")
    loaded, load = [], datasets.load_dataset

    def from_folder(name, subset, *, revision, **options):
        loaded.append(load(str(tmp_path / "set"), cache_dir=str(tmp_path / "kept"), **options))
        return loaded[-1]

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    read = [row for _, row in hub_rows("hf:org/name", "a1b2")]
    assert loaded[0].cache_files
    assert read == [row for _, row in hub_rows("hf:org/name", "a1b2", keep=False)]
    assert read == [row | {"label": str(row["label"])} for row in rows]
