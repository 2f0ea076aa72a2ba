"""Our tokenizer, others' tokenizers, and the ids of a document."""

import itertools
from collections import Counter

import numpy as np
import pytest

from clearhead.data import BEGIN, END, PAD, DataConfig, prepare
from clearhead.data.sources import find, sample, scan, threshold
from clearhead.data.tokenizer import Encoder, cut, train
from clearhead.errors import ClearheadError


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
