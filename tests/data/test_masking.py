"""Hidden tokens: how many, which, what is shown instead, and that it is a function of the step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clearhead.data import Batches, MaskedBatches, Masking, prepare, with_mask_token
from clearhead.data.batches import document_inputs, document_starts
from clearhead.errors import ClearheadError

SPECIAL, SIZE = [0, 1, 2, 299], 300
TOKENIZER = SimpleNamespace(
    mask_token_id=299, all_special_ids=SPECIAL, get_vocab=lambda: {str(i): i for i in range(SIZE)}
)


def _ids(rows: int, length: int, *, special: int = 0) -> np.ndarray:
    draw = np.random.default_rng(0)
    ids = draw.integers(3, SIZE - 1, (rows, length))
    ids[:, :special] = draw.choice(SPECIAL[:3], (rows, special))
    return ids


@pytest.mark.parametrize(
    ("length", "special", "count"), [(128, 0, 32), (17, 4, 3), (5, 4, 1), (6, 6, 0)]
)
def test_every_row_hides_its_share_of_ordinary_tokens(length, special, count):
    ids = _ids(50, length, special=special)
    shown, labels = Masking(TOKENIZER)(ids, "x")
    hidden = labels != -100
    assert (hidden.sum(1) == count).all()
    assert not np.isin(ids[hidden], SPECIAL).any()
    assert (labels[hidden] == ids[hidden]).all()
    assert (shown[~hidden] == ids[~hidden]).all()


def test_eight_of_ten_are_masks_one_another_token_and_one_itself():
    ids = _ids(400, 256)
    shown, labels = Masking(TOKENIZER)(ids, "x")
    hidden = labels != -100
    n = hidden.sum()
    assert n == 400 * 64
    masks = (shown[hidden] == 299).mean()
    same = (shown[hidden] == ids[hidden]).mean()
    # Five standard deviations of a share of 25,600.
    assert masks == pytest.approx(0.8, abs=5 * (0.16 / n) ** 0.5)
    assert same == pytest.approx(0.1 + 0.1 / 296, abs=5 * (0.09 / n) ** 0.5)
    others = shown[hidden & (shown != 299) & (shown != ids)]
    assert not np.isin(others, SPECIAL).any()
    assert len(np.unique(others)) > 290, "any ordinary token may be shown"
    # Places are uniform: no column is hidden much more often than another.
    assert hidden.mean(0) == pytest.approx(np.full(256, 0.25), abs=5 * (0.1875 / 400) ** 0.5)


GOLDEN = [0, 1, 2, 7, 10, 12, 16, 27]


def test_what_is_drawn_is_a_function_of_the_label():
    ids, masking = _ids(4, 32), Masking(TOKENIZER)
    first, again, other = masking(ids, "a"), masking(ids, "a"), masking(ids, "b")
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert (first[1] != other[1]).any()
    # For ever: a run goes on in another process, with another NumPy.
    assert np.flatnonzero(first[1][0] != -100).tolist() == GOLDEN


def test_a_corpus_gets_a_mask_token_and_keeps_its_tokens(folder, configure):
    corpus = prepare(configure(folder))
    with pytest.raises(ClearheadError, match="no mask token"):
        Masking(corpus.tokenizer)
    masked = with_mask_token(corpus)
    assert masked.tokenizer.mask_token == "<|mask|>"
    assert masked.tokenizer.mask_token_id == corpus.vocabulary_size
    assert masked.vocabulary_size == corpus.vocabulary_size + 1
    assert masked.fingerprint == corpus.fingerprint
    assert masked.split("train")[0] is corpus.split("train")[0]
    assert corpus.tokenizer.mask_token_id is None, "the corpus given stays as it was"
    assert with_mask_token(masked) is masked

    plain = Batches(corpus, sequence_length=16, batch_size=3, seed=5)
    batches = MaskedBatches(plain, Masking(masked.tokenizer))
    later, whole = batches.batch(7), plain.batch(7)
    hidden = later["labels"] != -100
    assert torch.equal(torch.where(hidden, later["labels"], later["input_ids"]), whole["input_ids"])
    assert batches.fingerprint != MaskedBatches(plain, Masking(masked.tokenizer, 0.5)).fingerprint


@pytest.mark.parametrize("begin", ["own", "the end's", "none"])
def test_documents_are_found_in_windows_as_training_knows_them(begin, folder, configure, tmp_path):
    tokenizer = prepare(configure(folder)).tokenizer
    if begin != "own":  # as in GPT-2, and in T5
        tokenizer.bos_token = tokenizer.eos_token if begin == "the end's" else None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    corpus = prepare(configure(folder, tokenizer=str(tmp_path / "tokenizer")))
    assert (corpus.tokenizer.bos_token_id is None) == (begin == "none")
    batches = Batches(corpus, sequence_length=3000, batch_size=3, seed=5, document_masks=True)
    for step in range(2):
        batch = batches.batch(step)
        ids = batch["input_ids"]
        found = document_inputs(ids, document_starts(ids, corpus.tokenizer))
        assert int(found["document_ids"].max()) > 0
        assert torch.equal(found["document_ids"], batch["document_ids"])
        assert torch.equal(found["position_ids"], batch["position_ids"])
        assert torch.equal(found["labels"][:, 1:], batch["labels"][:, 1:])
