"""A corpus from its sources: its split, its tokens, and what is said of it."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from clearhead.data import DataConfig, prepare, tokenizer
from clearhead.data.corpus import map_stream
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of

from .conftest import documents


def test_every_document_is_on_one_side_as_it_was_written(folder, configure):
    (folder / "special.txt").write_text("it says <|end|> and\r\n naïve \U0001f600\n")
    corpus = prepare(configure(folder))
    train, validation = documents(corpus, "train"), documents(corpus, "validation")
    written = [path.read_bytes().decode() for path in folder.iterdir()]
    assert sorted(train + validation) == sorted(written)
    assert train
    assert validation
    with pytest.raises(ClearheadError, match="unknown split 'valid'"):
        corpus.split("valid")


def test_adding_documents_moves_none_and_equal_ones_are_on_the_same_side(
    folder, configure, tmp_path, lines
):
    before = set(documents(prepare(configure(folder)), "validation"))
    shutil.copytree(folder, tmp_path / "other")
    for number in range(100, 140):
        (folder / f"{number}.txt").write_text(lines(number))
    after = prepare(configure(folder, tmp_path / "other"))
    train, validation = documents(after, "train"), documents(after, "validation")
    assert before <= set(validation)
    assert len(train) + len(validation) == 100
    assert not set(train) & set(validation)
    assert 4 <= len(set(validation)) <= 26  # of 70, a share of 0.2


def test_the_smallest_corpus_has_two_sides(tmp_path, configure):
    root = tmp_path / "two"
    root.mkdir()
    for name in ("one", "two"):
        (root / f"{name}.txt").write_text(name)
    for share in (0.0001, 0.9999):
        corpus = prepare(configure(root, validation=share))
        assert [len(documents(corpus, split)) for split in ("train", "validation")] == [1, 1]
    (root / "two.txt").write_text("one")
    with pytest.raises(ClearheadError, match=r"too small to split \(2 document\(s\), all alike"):
        prepare(configure(root))


def test_one_text_file_is_split_by_pieces(tmp_path, configure, lines):
    path = tmp_path / "book.txt"
    path.write_text("".join(lines(number) for number in range(20)))
    corpus = prepare(configure(path))
    assert len(documents(corpus, "train")) > 3
    assert documents(corpus, "validation")
    assert corpus.describe()["documents"] > 20
    path.write_text("  \n\n ")
    with pytest.raises(ClearheadError, match=r"holds no text \(1 empty\)"):
        prepare(configure(path))


def test_description_is_json_and_names_only_what_the_user_named(folder, configure, monkeypatch):
    monkeypatch.chdir(folder.parent)
    corpus = prepare(configure("texts@2", "texts@1"))
    told = json.loads(json.dumps(corpus.describe()))
    assert str(folder.parent) not in json.dumps(told)
    assert [(s["spec"], s["weight"]) for s in told["sources"]] == [("texts", 2.0), ("texts", 1.0)]
    assert told["documents"] == 60
    assert told["fingerprint"] == corpus.fingerprint
    for split in ("train", "validation"):
        assert told["tokens"][split] == sum(map(len, corpus.split(split)))
        assert told["sources"][0][split]["documents"] == len(corpus.split(split)[0].starts)


def test_text_in_the_tokenizer_at_once_is_bounded_and_written_in_order(
    tmp_path, configure, monkeypatch, lines
):
    path, sizes = tmp_path / "rows.jsonl", []
    rows = ["".join(map(lines, range(20))), "short", *map(lines, range(100, 130)), "x" * 20_000]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

    def measured(self, texts, original=tokenizer.Encoder.encode):
        sizes.append(sum(map(len, texts)))
        return original(self, texts)

    monkeypatch.setattr(tokenizer.Encoder, "encode", measured)
    monkeypatch.setattr("clearhead.data.corpus._BATCH_CHARACTERS", 5000)
    monkeypatch.setattr("clearhead.data.corpus._PIECE_CHARACTERS", 3000)
    cut = prepare(configure(path))
    assert max(sizes) <= 5000
    for split in ("train", "validation"):
        found = documents(cut, split)
        assert found == [row for row in rows if row in found]
        assert found
    assert len(documents(cut, "train")) + len(documents(cut, "validation")) == len(rows)
    assert os.environ.get("TOKENIZERS_PARALLELISM") != "true"


def test_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "here"))
    assert DataConfig().cache_folder == tmp_path / "here"
    monkeypatch.delenv("CLEARHEAD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataConfig().cache_folder == tmp_path / ".cache" / "clearhead"


def build(root):
    """The one published build under a cache."""
    (folder,) = (path for path in (root / "corpora").iterdir() if path.name[0] != ".")
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """Counts the texts that are tokenised."""
    counts = []
    original = tokenizer.Encoder.encode

    def counted(self, texts):
        counts.append(len(texts))
        return original(self, texts)

    monkeypatch.setattr(tokenizer.Encoder, "encode", counted)
    return counts


def _aged(root):
    """Give every file a time long past: one of now might change again within a tick."""
    for path in (path for path in root.rglob("*") if path.is_file()):
        os.utime(path, (1e9, 1e9))


def test_what_did_not_change_is_neither_read_nor_tokenised_again(
    folder, configure, encoded, monkeypatch
):
    _aged(folder)
    config = configure(folder)
    first = prepare(config)
    assert sum(encoded) == 30
    monkeypatch.setattr(tokenizer, "train", None)
    _aged(config.cache / "corpora")
    prepare(config)
    monkeypatch.setattr("clearhead.data.sources.Source.documents", None)
    monkeypatch.setattr("clearhead.records.manifest.sha256_of", None)
    said = []
    again = prepare(config, progress=said.append)
    assert again.fingerprint == first.fingerprint
    assert again.describe() == first.describe()
    assert "30 documents, 0.1 MB, unchanged since it was read" in said[0]
    assert "reusing the tokens" in said[-1]
    assert sum(encoded) == 30
    one, two = first.split("train")[0], again.split("train")[0]
    assert isinstance(two.tokens, np.memmap)
    assert one.tokens.tolist() == two.tokens.tolist()


def test_a_file_that_is_edited_replaced_added_or_taken_away_is_noticed(folder, configure, lines):
    """Even where it keeps its size, and its old time is put back."""
    path, new = folder / "00.txt", folder / "99.txt"
    before = path.read_text()
    _aged(folder)
    seen = [prepare(configure(folder)).fingerprint]
    for change in (
        lambda: path.write_text(before.replace("alpha", "alphb", 1)),
        lambda: path.write_text(before),
        lambda: new.write_text(lines(99)),
        lambda: (folder / "new").write_text(lines(98)) and os.replace(folder / "new", new),
        lambda: new.unlink(),
    ):
        change()
        _aged(folder)
        seen.append(prepare(configure(folder)).fingerprint)
    assert seen[0] == seen[2] == seen[5]
    assert len(set(seen)) == 4
    fresh = prepare(configure(folder, cache=folder.parent / "fresh"))
    assert seen[5] == fresh.fingerprint


@pytest.mark.parametrize("form", [lambda f: f, lambda f: f"{f}, 0.25 hidden"])
def test_a_run_is_not_gone_on_with_on_changed_text_which_is_not_tokenised(
    folder, configure, encoded, form
):
    config = configure(folder)
    first = prepare(config)
    began = form(first.fingerprint)
    prepare(config, began=began)
    prepare(config, began=form(digest_of([first.for_tuning().fingerprint, "feistel"])))
    path = folder / "00.txt"
    path.write_text(path.read_text().replace("alpha", "alphb", 1))
    with pytest.raises(ClearheadError, match=r"texts: the text or the tokenizer changed since the"):
        prepare(config, began=began)
    assert sum(encoded) == 30


def test_a_damaged_survey_is_made_anew(folder, configure):
    _aged(folder)
    config = configure(folder)
    first = prepare(config)
    (path,) = (config.cache / "surveys").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b"[30, ", b"[31, "), b"[1]", b""):
        assert damaged != whole
        path.write_bytes(damaged)
        assert prepare(config).describe() == first.describe()
        assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_still_read_or_refused_with_the_way_out(
    folder, configure, tmp_path
):
    _aged(folder)
    config = configure(folder)
    first = prepare(config)
    for root in (config.cache / "surveys", tmp_path / "other"):
        shutil.rmtree(root, ignore_errors=True)
        root.write_text("a file in its way")
    assert prepare(config).fingerprint == first.fingerprint
    with pytest.raises(ClearheadError, match=r"cannot write .* name another folder"):
        prepare(configure(folder, cache=tmp_path / "other"))


def test_other_options_are_another_build_and_weights_need_no_other_tokens(
    folder, configure, encoded
):
    seen = {prepare(configure(folder)).fingerprint}
    for options in ({"vocabulary": 270}, {"validation": 0.5}, {"limit": 5000}):
        seen.add(prepare(configure(folder, **options)).fingerprint)
    count = len(encoded)
    seen.add(prepare(configure(f"{folder}@1")).fingerprint)
    assert len(seen) == 5
    assert len(encoded) == count


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 9), flip, os.unlink])
@pytest.mark.parametrize(
    "name", ["0.train.tokens", "0.validation.starts", "corpus.json", "tokenizer/tokenizer.json"]
)
def test_damaged_build_is_made_anew(folder, configure, encoded, damage, name):
    config = configure(folder)
    before = prepare(config).split("train")[0].tokens.tolist()
    _aged(config.cache / "corpora")
    prepare(config)
    assert list((config.cache / "checked").iterdir())
    damage(build(config.cache) / name)
    _aged(config.cache / "corpora")
    said = []
    after = prepare(config, progress=said.append)
    assert any(f"{name} is missing, cut short or changed: its tokens" in line for line in said)
    assert sum(encoded) == 60
    assert after.split("train")[0].tokens.tolist() == before
    assert os.listdir(config.cache / "corpora") == [build(config.cache).name]
    prepare(config)
    assert sum(encoded) == 60


def test_data_that_changes_while_it_is_read(folder, configure, monkeypatch):
    def train(texts, vocabulary, original=tokenizer.train):
        (folder / "00.txt").write_text("other")
        return original(texts, vocabulary)

    monkeypatch.setattr(tokenizer, "train", train)
    _aged(folder)
    with pytest.raises(ClearheadError, match="changed while it was read"):
        prepare(configure(folder))
    assert not list((folder.parent / "cache" / "surveys").iterdir())  # nothing of it is kept


def test_a_process_waits_for_another_that_makes_the_same(folder, configure, encoded, monkeypatch):
    config, corpora, said, first = configure(folder), [], [], threading.Event()

    def train(texts, vocabulary, original=tokenizer.train):
        thread.start()
        assert first.wait(20)
        return original(texts, vocabulary)

    def second():
        def say(line):
            said.append(line)
            if "waiting for another process" in line:
                first.set()

        corpora.append(prepare(config, progress=say))

    thread = threading.Thread(target=second)
    monkeypatch.setattr(tokenizer, "train", train)
    corpora.append(prepare(config))
    thread.join()
    assert sum(encoded) == 30
    assert corpora[0].fingerprint == corpora[1].fingerprint
    assert "reusing the tokens" in said[-1]


def test_windows_are_read_without_being_kept(tmp_path):
    """Mapped pages would count as the process's memory, and bring their neighbours."""

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    for kind, size in (("tokens", 10**11), ("starts", 0)):
        (tmp_path / f"0.train.{kind}").touch()
        os.truncate(tmp_path / f"0.train.{kind}", size)
    stream = map_stream(tmp_path / "0.train", "<u2", "s", None)
    before = resident()
    for number in range(2000):
        stream.window(number * 20_000_003, 2048)
    assert resident() - before < 16


def test_a_shard_that_is_cut_short_while_it_is_read_is_one_line(folder, configure):
    config = configure(folder)
    (stream,) = prepare(config).split("train")
    assert stream.window(10, 20).tolist() == stream.tokens[10:30].tolist()
    length = len(stream)
    os.truncate(build(config.cache) / "0.train.tokens", 20)
    with pytest.raises(ClearheadError, match="were cut short while they were in use: start again"):
        stream.window(length - 20, 20)
