"""The order of windows: a pure function, complete, and mixed as asked."""

import gzip
import hashlib
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data import Batches, MaskedBatches, Masking, prepare, windows, with_mask_token
from clearhead.data.batches import BLOCK, COMPUTED, apportion, document_inputs, document_starts
from clearhead.data.corpus import Corpus, TokenStream
from clearhead.data.seeded import feistel, permutation
from clearhead.errors import ClearheadError


def corpus(*lengths, weights=None, starts=None):
    """Streams of consecutive numbers, so that a token tells its place: stream s is from 10^5·s."""
    streams = tuple(
        TokenStream(
            spec=f"s{number}",
            weight=weights[number] if weights else None,
            tokens=np.arange(length, dtype=np.uint32) + 100_000 * number,
            starts=np.asarray(starts if starts is not None else [0], dtype=np.int64),
        )
        for number, length in enumerate(lengths)
    )
    return Corpus(
        tokenizer=None,
        vocabulary_size=100_000 * len(lengths),
        fingerprint="f",
        streams={"train": streams, "validation": streams},
    )


def firsts(batches, count):
    """The first token of the first `count` sequences."""
    steps = -(-count // batches.batch_size)
    rows = torch.cat([batches.batch(step)["input_ids"] for step in range(steps)])
    return rows[:count, 0].tolist()


@given(
    st.lists(st.integers(40, 300), min_size=1, max_size=3),
    st.integers(2, 20),
    st.integers(1, 5),
    st.integers(0, 2**63),
)
@settings(max_examples=25, deadline=None)
def test_every_epoch_visits_every_window_once_and_any_step_comes_at_any_time(
    sizes, length, size, seed
):
    size = min(size, max(1, 39 // (length - 1)))
    options = {"sequence_length": length, "batch_size": size, "seed": seed}
    batches = Batches(corpus(*sizes), **options)
    expected = [
        100_000 * number + i * (length - 1)
        for number, tokens in enumerate(sizes)
        for i in range((tokens - 1) // (length - 1))
    ]
    visited = firsts(batches, 2 * len(expected))
    assert sorted(visited[: len(expected)]) == expected
    assert sorted(visited[len(expected) :]) == expected
    step = len(expected) // size
    ids = Batches(corpus(*sizes), **options).batch(step)["input_ids"]
    assert torch.equal(ids, batches.batch(step)["input_ids"])
    assert ids.shape == (size, length)
    assert (ids.diff(dim=1) == 1).all()  # contiguous, and within one stream


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [1, 999], [3, 1, 1 / 3]])
def test_weights_are_met_exactly_in_every_block_and_sources_have_epochs_of_their_own(weights):
    mixed = corpus(*[201] * len(weights), weights=weights)
    batches = Batches(mixed, sequence_length=11, batch_size=8, seed=3)
    visited = firsts(batches, 3 * BLOCK)
    sources = [token // 100_000 for token in visited]
    quotas = apportion(BLOCK, weights)
    for block in range(3):
        part = sources[block * BLOCK : (block + 1) * BLOCK]
        assert [Counter(part)[number] for number in range(len(weights))] == quotas
        assert part != sorted(part)
    assert sources[:BLOCK] != sources[BLOCK : 2 * BLOCK]
    own = [token % 100_000 for token in visited if token < 100_000]
    for epoch in range(len(own) // 20):
        assert sorted(own[20 * epoch : 20 * epoch + 20]) == [10 * i for i in range(20)]


def test_a_begin_token_stands_first_in_every_window_and_no_target_is_lost():
    options = {"sequence_length": 5, "batch_size": 2, "seed": 3}
    plain, begun = (Batches(corpus(41), begin=begin, **options) for begin in (None, 99_999))
    targets = []
    for step in range(5):
        batch, other = begun.batch(step), plain.batch(step)
        assert torch.equal(other["input_ids"], other["labels"])
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert batch["input_ids"][:, 0].tolist() == [99_999] * 2
        assert torch.equal(batch["input_ids"][:, 1:], other["input_ids"][:, 1:])
        targets += batch["labels"][:, 1:].flatten().tolist()  # as a model shifts them
        batch["labels"].zero_()
        assert batch["input_ids"].any()
    assert sorted(targets) == list(range(1, 41))


def test_document_masks():
    starts = [0, 3, 4, 9, 20]
    options = {"sequence_length": 7, "batch_size": 4, "seed": 0, "document_masks": True}
    batch = Batches(corpus(25, starts=starts), **options).batch(0)
    for row in range(4):
        tokens = batch["input_ids"][row].tolist()
        documents = [max(n for n, start in enumerate(starts) if start <= t) for t in tokens]
        assert batch["document_ids"][row].tolist() == [n - documents[0] for n in documents]
        assert batch["position_ids"][row].tolist() == [
            token - max(starts[n], tokens[0]) for token, n in zip(tokens, documents, strict=True)
        ]
        assert batch["labels"][row].tolist() == [-100 if t in starts else t for t in tokens]
    assert {array.dtype for array in batch.values()} == {torch.int64}


@pytest.mark.parametrize(
    ("streams", "options", "match"),
    [
        (corpus(30), {"batch_size": 8}, r"3 windows of 10, but .* takes 1 x 8 windows \(80 tok"),
        (corpus(60), {"batch_size": 2, "accumulation": 4}, r"6 windows .* takes 4 x 2 windows"),
        (corpus(0), {}, "holds 0 tokens, 0 windows"),
        (corpus(99, 5, weights=[1, 1]), {}, "'s1' would never be read: .* 0 windows of 10"),
        (corpus(99, 99, weights=[1, 1e-5]), {}, "'s1' would never .* weight 1e-05 is 0 in 1000"),
    ],
)
def test_what_cannot_be_batched(streams, options, match):
    defaults = {"sequence_length": 10, "batch_size": 1, "seed": 0}
    with pytest.raises(ClearheadError, match=match):
        Batches(streams, **(defaults | options))


@pytest.mark.parametrize(
    ("text", "options", "first"),
    [
        (corpus(25, 9, 12), {"length": 10}, [0, 10, 200_000]),
        (corpus(80, 40), {"length": 10, "count": 3}, [0, 10, 100_000]),  # shared by what they hold
        (corpus(80, 40), {"length": 20, "count": 99}, [0, 20, 40, 60, 100_000, 100_020]),
        (corpus(30, starts=[0, 4, 15, 25]), {"length": 5, "at": "documents"}, [4, 15, 25]),
        (corpus(30, starts=[0, 4, 15]), {"length": 5, "count": 1, "at": "documents"}, [4]),
    ],
)
def test_evaluation_windows_are_in_order_and_do_not_overlap(text, options, first):
    found = list(windows(text, **options))
    assert [w.tolist() for w in found] == [list(range(n, n + options["length"])) for n in first]
    assert found[0].dtype == torch.int64


def test_another_seed_draws_windows_from_all_of_the_text_and_none_is_an_error_at_the_call():
    drawn = [int(w[0]) for w in windows(corpus(1000), length=10, count=5, seed=1)]
    assert drawn == sorted(drawn) != [0, 10, 20, 30, 40]
    assert len(set(drawn)) == 5
    for at, place in (("anywhere", "source"), ("documents", "document")):
        with pytest.raises(ClearheadError, match=f"holds 14 tokens, in no {place} enough for one"):
            windows(corpus(9, 5), length=10, at=at)


def test_settings_are_chosen_on_training_text_that_their_runs_do_not_read():
    """A tenth, from a document on where one begins there; the validation split stays unread."""
    whole = corpus(100, starts=[0, 30, 95])
    for text, cut in ((whole, 95), (corpus(40), 36)):
        tuned = text.for_tuning()
        (train,), (rest,) = tuned.split("train"), tuned.split("validation")
        assert [*train.tokens, *rest.tokens] == [*range(len(text.split("train")[0]))]
        assert len(train) == cut
    tuned = whole.for_tuning()
    (train,), (rest,) = tuned.split("train"), tuned.split("validation")
    assert (train.starts.tolist(), rest.starts.tolist()) == ([0, 30], [0])
    assert tuned.fingerprint != whole.fingerprint


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2000), st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8))
def test_apportion(seats, weights):
    shares = apportion(seats, weights)
    assert sum(shares) == seats
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - seats * weight / sum(weights)) <= 1 + 1e-9


@given(st.integers(1, 300), st.text(max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_computed_order_is_a_permutation(size, label):
    assert sorted(feistel(label, size, n) for n in range(size)) == list(range(size))


def test_orders_are_the_same_for_ever_and_mix():
    """Not the numbers matter, but that an upgrade of Python, NumPy or ourselves keeps them."""
    assert permutation("seed 0, epoch 0 of pool 0", 8).tolist() == [7, 1, 0, 3, 5, 4, 6, 2]
    first = [feistel("seed 0", 10**9, place) for place in range(3)]
    assert first == [631170123, 56934021, 860544414]
    order, other = (
        np.array([feistel(f"seed {seed}", COMPUTED, place) for place in range(4000)])
        for seed in (1, 2)
    )
    assert abs(order.mean() / COMPUTED - 0.5) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert (order == other).sum() < 5


def test_a_run_of_before_keeps_the_order_that_was_written_out():
    text = corpus(COMPUTED + 1)
    options = {"sequence_length": 2, "batch_size": 8, "seed": 3}
    new, old = Batches(text, **options), Batches(text, **options, began=text.fingerprint)
    label = "seed 3, epoch 0 of pool 0"
    assert firsts(old, 24) == permutation(label, COMPUTED)[:24].tolist()
    assert firsts(new, 24) == [feistel(label, COMPUTED, place) for place in range(24)]
    assert old.fingerprint == text.fingerprint != new.fingerprint
    hidden = f"{text.fingerprint}, 0.25 hidden"
    assert firsts(Batches(text, **options, began=hidden), 24) == firsts(old, 24)
    again = Batches(text, **options, began=new.fingerprint)
    assert firsts(again, 24) == firsts(new, 24)
    assert Batches(corpus(COMPUTED), **options).fingerprint == text.fingerprint


STEPS = (0, 1, 2, 3, 250, 251, 10_000)


@pytest.fixture
def sources(folder, tmp_path, lines):
    """A folder of every format, a text that is cut into pieces, rows in three files."""
    (folder / "bom.txt").write_bytes("\ufeffa naïve text\r\n\tof two lines".encode())
    (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
    (folder / "empty.md").write_text(" \n")
    (folder / "code.py").write_text("def f(x):\n    return '<|end|>' + x\n" * 9)
    (folder / "packed.md.gz").write_bytes(gzip.compress(lines(77).encode()))
    rows = [{"text": lines(seed, 3), "body": lines(seed + 1, 2)} for seed in range(200, 230)]
    rows += [{"text": None, "body": "b"}, {"body": "\ud800 é 😀", "text": "a\ud800b"}]
    content = "\n\n".join(map(json.dumps, rows))
    (folder / "rows.jsonl").write_text(content)
    (folder / "rows2.jsonl.gz").write_bytes(gzip.compress(content[: content.index("\n")].encode()))
    table = pyarrow.table({"number": list(range(32)), "text": [lines(n, 2) for n in range(32)]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=7)
    (tmp_path / "book.txt").write_text("".join(lines(seed) for seed in range(300, 330)))
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress((tmp_path / "book.txt").read_bytes()))
    (tmp_path / "own.jsonl").write_text(content)
    files = {"book": "book.txt", "packed": "book.txt.gz", "rows": "own.jsonl"}
    own = {name: tmp_path / file for name, file in files.items()}
    return own | {"folder": folder, "made": "synthetic:recall:documents=40"}


def _digest(batches):
    found = hashlib.sha256()
    for step in STEPS:
        for name, tensor in sorted(batches.batch(step).items()):
            found.update(name.encode() + np.ascontiguousarray(tensor.numpy()).tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("words", "options", "frozen"),
    [
        ("folder", {}, "53c92f3ac21a133f"),
        ("folder book rows made", {}, "651bf6decda7ccb1"),
        ("folder@0.5 packed@0.2 made", {}, "ece84d44a0627dcc"),
        ("rows", {"text_field": "body"}, "3961543722d4b395"),
        ("book folder", {"limit": 9000}, "0bef96fe3ca1ea7b"),
    ],
)
def test_batches_are_those_of_before(words, options, frozen, sources, configure, monkeypatch):
    """The corpus's fingerprint, then batches of seeds 0 and 7 without and with document masks,
    those of tuning, and masked ones."""
    monkeypatch.setattr(
        "clearhead.data.tokenizer.identity", lambda _, vocabulary: f"BPE {vocabulary}"
    )
    monkeypatch.chdir(sources["folder"].parent)
    names = [one.partition("@") for one in words.split()]
    data = [f"{sources[name]}{at}{weight}" for name, at, weight in names]
    corpus = prepare(configure(*data, vocabulary=300, **options))
    masked, shape = with_mask_token(corpus), {"sequence_length": 33, "batch_size": 4}
    kinds = itertools.product((0, 7), (False, True))
    made = [Batches(corpus, seed=seed, document_masks=masks, **shape) for seed, masks in kinds]
    made.append(Batches(corpus.for_tuning(), seed=0, **shape))
    made.append(MaskedBatches(Batches(masked, seed=1, **shape), Masking(masked.tokenizer)))
    found = " ".join([corpus.fingerprint[:16], *map(_digest, made)])
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == frozen


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
