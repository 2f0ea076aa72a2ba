"""A corpus from its sources: its split, its tokens, and what is said of it."""

import json
import os
import shutil

import pytest

from clearhead.data import DataConfig, prepare, tokenizer
from clearhead.errors import ClearheadError

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
