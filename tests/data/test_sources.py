"""From the words of a user to documents, and every way in which that fails; tokenizers."""

import gzip
import io
import itertools
import os
import re
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from clearhead.data import BEGIN, END, PAD, DataConfig, prepare, readers
from clearhead.data.readers import cut_stream
from clearhead.data.sources import find, parse, passages, sample, scan, threshold
from clearhead.data.tokenizer import Encoder, cut, train
from clearhead.errors import ClearheadError


def texts(*data, **options):
    """All texts of all sources, and what was skipped."""
    skipped = Counter()
    config = DataConfig(data=tuple(map(str, data)), **options)
    found = [d.text for s in find(config, lambda line: None) for d in s.documents(skipped)]
    return found, dict(skipped)


def refuses(match, *data, **options):
    with pytest.raises(ClearheadError, match=match) as caught:
        texts(*data, **options)
    assert "\n" not in str(caught.value)


def test_weight_is_after_the_last_at(tmp_path):
    path = tmp_path / "me@home.txt"
    path.write_text("hello")
    for spec in ("python-stdlib", "hf:a/b:c#d", str(path)):
        assert parse(spec) == (spec, None)
        assert parse(f"{spec}@0.25") == (spec, 0.25)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        *(
            ([f"python-stdlib@{weight}"], r"weight after '@' is .*; give a number above 0")
            for weight in ("much", "0", "-1", "nan", "inf", "")
        ),
        *(([word], "names no source") for word in ("", " ", "@1")),
        (["python-packages@1", "python-stdlib"], "'python-stdlib' has no weight while others"),
        (["/nowhere.txt"], "no such file or folder; give an existing path"),
        (["python-stdlbi"], "no such file or folder; give .*, python-stdlib, python-packages or"),
    ],
)
def test_words_that_name_no_source(words, match):
    refuses(match, *words)


PACKED = gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)  # every worker names a case alike


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.xlsx", b"x", "cannot read it, for it is not a .txt"),
        ("folder/a.png", b"x", r"nothing in this folder is a \.txt"),
        ("a.txt", b"x\n" * 3000 + b"\0", "byte 0x00 at offset 6000 is not UTF-8"),
        ("a.txt", b"x\n" * 3000 + b"abc\xe9 xyz", "byte 0xe9 at offset 6003 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2: expected a JSON object, found a list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: not JSON .*position 10"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: field 'text' holds a int, not a string"),
        ("a.jsonl.gz", b"plain", "not a whole gzip file"),
        ("a.jsonl.gz", PACKED[:-10], "not a whole gzip file"),
        ("a.jsonl.gz", PACKED[:12] + bytes([PACKED[12] ^ 255]) + PACKED[13:], "not a whole gzip"),
        ("a.parquet", b"PAR1 but not really", r"not a whole \.parquet file"),
        *((f"pipe.{kind}", None, "not a regular file") for kind in ("txt", "jsonl", "parquet")),
    ],
)
def test_files_that_are_no_text(name, content, match, tmp_path):
    """A pipe is not waited for."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if content is None else path.write_bytes(content)
    refuses(match, path.parent if "folder" in name else path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"data": "python-stdlib"}, "give a tuple"),
        ({"data": ()}, "give a tuple"),
        ({"validation": 0.0}, "between 0 and 1"),
        ({"validation": 1.0}, "between 0 and 1"),
        ({"limit": 0}, "number of bytes above 0"),
    ],
)
def test_config_is_checked(options, match):
    with pytest.raises(ClearheadError, match=match):
        DataConfig(**options)


def test_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "z.md").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n\n{"text": "five"}\n')
    (tmp_path / "b" / "y.py").write_text("two = 2")
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "six"}\n')
    with gzip.open(tmp_path / "e.txt.gz", "wt") as file:
        file.write("seven")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["eight", None, "nine"], "other": [1, 2, 3]}), tmp_path / "f.parquet"
    )
    found, skipped = texts(tmp_path)
    assert found == ["one", "two = 2", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert skipped == {"empty": 1}


def test_binary_file_in_a_folder_is_skipped_and_a_limit_stops_a_source(folder):
    (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
    (folder / "empty.txt").write_bytes(b"")
    found, skipped = texts(folder)
    assert len(found) == 30
    assert skipped == {"undecodable": 1, "empty": 1}
    size = (folder / "00.txt").stat().st_size
    assert [len(texts(folder, limit=size + more)[0]) for more in (0, 1)] == [1, 2]


def test_missing_text_field_names_the_fields_there_are(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "title": "y"}\n')
    refuses("line 1: no field 'text', it has 'body', 'title'", path)
    assert texts(path, text_field="body")[0] == ["x"]
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), table)
    refuses("no field 'text', it has 'body'", table)
    assert texts(table, text_field="body")[0] == ["x"]


def test_a_limit_reads_no_more_of_a_packed_file_than_it_needs(tmp_path, monkeypatch):
    read = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or original(self, size)
    )
    text = tmp_path / "bomb.txt.gz"
    text.write_bytes(gzip.compress(b"word " * (8 << 20)))
    assert sum(map(len, texts(text, limit=1000)[0])) <= readers.LONGEST_PIECE
    assert sum(read) < 20 << 20, "40 MiB are packed there"


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "deep/a.txt"])
def test_a_text_file_is_cut_at_line_ends_alone_or_in_a_folder(name, tmp_path):
    path = tmp_path / "books" / name
    path.parent.mkdir(parents=True)
    text = "".join(f"line {number} é\n" for number in range(3000))
    path.write_bytes((gzip.compress if name.endswith(".gz") else bytes)(text.encode()))
    pieces = texts(path)[0]
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(piece.endswith("\n") for piece in pieces)
    assert pieces == texts(tmp_path / "books")[0]
    for words in (path, tmp_path / "books", text):
        assert [*passages(str(words), print)] == [text]


@pytest.mark.parametrize("text", ["é" * 500, "\n" * 50, "ab\n" + "\U0001f600" * 90 + "\nend"])
@pytest.mark.parametrize("size", [4, 5, 7, 64])
def test_cut_loses_nothing_and_splits_no_character(text, size):
    pieces = list(cut_stream(io.BytesIO(text.encode()), size))
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_standard_library_and_packages_which_are_more():
    found, _ = texts("python-stdlib", limit=200_000)
    assert sum(len(text.encode()) for text in found) >= 200_000
    library, packages = find(DataConfig(data=("python-stdlib", "python-packages")), print)
    names = [path.as_posix() for path in library.files]
    assert [name for name in names if name.endswith("/json/decoder.py")]
    assert names == sorted(names)
    assert not [name for name in names if re.search("(site|dist)-packages/", name)]
    assert packages.files[: len(names)] == library.files
    more = [path.as_posix() for path in packages.files[len(names) :]]
    assert [name for name in more if name.endswith("-packages/torch/__init__.py")]


@pytest.fixture(scope="module")
def tokenizer(lines):
    return train([lines(seed) for seed in range(20)], 280)


def test_any_text_survives_and_never_becomes_a_special_token(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BEGIN, END, PAD)
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert len(tokenizer) == 280
    assert set(tokenizer("alpha")) == {"input_ids", "attention_mask"}
    text = f"naïve 漢字 \U0001f600\t\r\n  x\0 {BEGIN}{END}{PAD} after"
    (ids,) = Encoder(tokenizer).encode([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert not np.isin(ids, tokenizer.all_special_ids).any()
    # … while a prompt, for which the caller answers, may hold them.
    assert tokenizer.bos_token_id in tokenizer(text)["input_ids"]


def test_smallest_vocabulary():
    with pytest.raises(ClearheadError, match=r"vocabulary is 258: give at least 259 entries"):
        DataConfig(vocabulary=258)
    assert len(train(["x"], 259)) == 259


def test_existing_tokenizer_by_folder(folder, configure, tokenizer, tmp_path, lines):
    tokenizer.save_pretrained(tmp_path / "mine")
    corpus = prepare(configure(folder, tokenizer=str(tmp_path / "mine")))
    first = corpus.split("train")[0]
    assert corpus.vocabulary_size == 280
    assert corpus.tokenizer(lines(99)) == tokenizer(lines(99))
    assert corpus.tokenizer.padding_side == "left"
    assert first.tokens[0] == tokenizer.bos_token_id
    assert corpus.describe()["tokenizer"]["name"] == str(tmp_path / "mine")


def test_unfit_existing_tokenizers(tokenizer, tmp_path):
    with pytest.raises(ClearheadError, match=r"cannot load a tokenizer from .*nothing"):
        prepare(DataConfig(tokenizer=str(tmp_path / "nothing")))
    plain = train(["x"], 259)
    plain.eos_token = None
    with pytest.raises(ClearheadError, match="has no end token"):
        prepare(DataConfig(), tokenizer=plain)
    with pytest.raises(ClearheadError, match=r"data\.vocabulary has no effect: the model has its"):
        prepare(DataConfig(vocabulary=300), tokenizer=tokenizer)


def test_truncation_and_post_processing_of_a_tokenizer_are_off(tokenizer, lines):
    from tokenizers.processors import TemplateProcessing

    other = train([lines(seed) for seed in range(20)], 280)
    other.backend_tokenizer.enable_truncation(4)
    other.backend_tokenizer.enable_padding(length=9)
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, other.bos_token_id)]
    )
    assert (
        Encoder(other).encode([lines(1)])[0].tolist()
        == Encoder(tokenizer).encode([lines(1)])[0].tolist()
    )


def test_wide_ids_for_wide_vocabularies(tokenizer, lines):
    wide = train([lines(1)], 280)
    wide.add_tokens([f"extra{number}" for number in range(1 << 16)])
    assert Encoder(tokenizer).dtype == np.uint16
    assert Encoder(wide).dtype == np.uint32


def test_cut_is_at_line_ends_where_there_are_any():
    assert list(cut("ab\ncd\nefghijk", 4)) == ["ab\n", "cd\n", "efgh", "ijk"]
    assert list(cut("", 4)) == [""]
    assert list(cut("abcd", 4)) == ["abcd"]


def test_sample_is_bounded_spread_and_of_training_text(tmp_path, monkeypatch, configure, lines):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(200):
            text = f"{name}{number} held\n" + lines(number) * 2
            (tmp_path / name / f"{number:03}.txt").write_text(text)
    config = configure(tmp_path / "a", tmp_path / "b")
    sources = find(config, lambda line: None)
    scans = [scan(source, tmp_path, lambda line: None) for source in sources]
    cutoff, size = threshold(scans, 0.2), sum(one.size for one in scans)
    monkeypatch.setattr("clearhead.data.sources.SAMPLE_BYTES", size // 4)
    taken = list(sample(scans, cutoff))
    assert taken == list(sample(scans, cutoff))
    assert 0.1 * size < sum(map(len, taken)) < 0.3 * size
    names = {text.split(maxsplit=1)[0] for text in taken}
    for name, half in itertools.product("ab", (range(100), range(100, 200))):
        assert len(names & {f"{name}{number}" for number in half}) >= 8
    documents = [document for source in sources for document in source.documents(Counter())]
    held_out = {one.text.split(maxsplit=1)[0] for one in documents if one.key < cutoff}
    assert held_out
    assert not held_out & names
