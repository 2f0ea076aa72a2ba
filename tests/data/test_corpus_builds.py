"""Builds of a corpus: their reuse, and what an interruption or damage leaves."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from clearhead.data import prepare, tokenizer
from clearhead.data.corpus import map_stream
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of


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
