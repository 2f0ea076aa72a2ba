"""Sliding-window losses against one forward pass a token, in float64."""

import numpy as np
import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.eval.perplexity_task import HitsTask, PerplexityTask, hits
from clearhead.eval.sliding import sliding, windows_of
from clearhead.models import with_rope_scaling

from .conftest import numbers

VOCABULARY = architectures.VOCABULARY


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return architectures.make(name, max_position_embeddings=16).double()


def _token_by_token(model, document: np.ndarray, length: int, stride: int) -> dict[int, float]:
    """The definition, one token at a time: its context begins where the first window that holds it,
    as one that is not its window's first token, begins."""
    losses = {}
    ids = torch.from_numpy(document.astype(np.int64))
    for token in range(1, len(ids)):
        starts = [s for s in range(0, len(ids), stride) if s < token < s + length]
        if not starts:
            continue
        with torch.no_grad():
            context = ids[None, starts[0] : token]
            logits = model(context, use_cache=False).logits[0, -1]
        losses[token] = -float(logits.log_softmax(-1)[ids[token]])
    return losses


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (9, 1), (13, 7), (64, 10), (2, 1)])
@pytest.mark.parametrize("name", ["transformer", "alibi", "Llama"])
def test_equals_the_definition_token_by_token(name, length, stride):
    model = _model(name)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, VOCABULARY, size).astype(np.uint16) for size in (29, 41, 8, 2, 1)]
    found: list[dict[int, float]] = [{} for _ in texts]
    for window in sliding(model, texts, length=length, stride=stride, batch_tokens=40):
        for place, loss in enumerate(window.loss, window.start + window.position):
            assert place not in found[window.document]
            found[window.document][place] = loss
    for text, mine in zip(texts, found, strict=True):
        expected = _token_by_token(model, text, length, stride)
        assert sorted(mine) == sorted(expected)
        for token, loss in expected.items():
            assert mine[token] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("name", ["transformer", "Llama"])
@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic", "yarn"])
def test_batches_and_ragged_ends_change_nothing_under_scaling(name, kind):
    """transformers keeps the dynamic frequencies of the longest text so far: a shorter last window
    would be read with them."""
    model, fresh = (with_rope_scaling(_model(name), kind, factor=4) for _ in range(2))
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, VOCABULARY, size) for size in (70, 75, 50)]
    together, alone = (
        {
            (one.document, one.start + one.position): one.loss
            for one in sliding(model, texts, length=40, stride=20, batch_tokens=size)
        }
        for size in (1000, 1)
    )
    assert together.keys() == alone.keys()
    for place, loss in together.items():
        assert loss == pytest.approx(alone[place], rel=1e-5)
    ids = torch.from_numpy(texts[2])  # its last window, of 30 tokens, in a fresh model
    with torch.no_grad():
        logits = fresh(ids[None, 20:], use_cache=False).logits[0, 19:-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[40:], reduction="none")
    assert together[2, 40] == pytest.approx(expected.numpy(), rel=1e-5)


def test_half_precision_models_have_losses_in_float32():
    model = _model("transformer").to(torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (1, 30))
    (found,) = sliding(model, ids, length=30, stride=30, batch_tokens=30)
    with torch.no_grad():
        logits = model(ids).logits.float()[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(torch.from_numpy(found.loss).float(), expected)


def test_a_stride_that_leaves_tokens_out_is_refused():
    with pytest.raises(ClearheadError, match="stride is 9: give 1 to the window's length, 8"):
        list(windows_of(20, 8, 9))


def test_perplexity_pools_documents(subject):
    task = PerplexityTask(stride=50)
    cells = task.cells(subject)
    assert [cell["length"] for cell in cells] == [128, 192]
    found = numbers(task.measure(subject, cells[0]))
    books = found["documents"]
    assert len(books) > 3
    assert found["left_out"] == len(subject.texts.documents) - len(books)
    assert found["predicted_tokens"] == sum(book["predicted_tokens"] for book in books)
    assert all(book["predicted_tokens"] == 191 for book in books)
    pooled = sum(book["loss"] * book["predicted_tokens"] for book in books)
    assert found["loss"] == pytest.approx(pooled / found["predicted_tokens"])
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    assert "books.jsonl" in books[0]["document"]


def test_hits_are_repeated_ngrams():
    ids = np.array([5, 1, 2, 5, 1, 1, 1, 2])
    assert hits(ids).astype(int).tolist() == [0, 0, 0, 0, 1, 0, 1, 1]


def test_hits_and_others_make_up_the_loss(subject):
    task = HitsTask()
    cell = task.cells(subject)[0]
    found = numbers(task.measure(subject, cell))
    others = found["predicted_tokens"] - found["ar_hits"]
    total = found["ar_hit_loss"] * found["ar_hits"] + found["others_loss"] * others
    assert total / found["predicted_tokens"] == pytest.approx(found["loss"])
    assert 0 < found["ar_hits"] < found["predicted_tokens"]


def test_texts_shorter_than_the_window_are_named(make_subject):
    long = make_subject(lengths=(128, 100_000))
    with pytest.raises(ClearheadError, match=r"no document of 100,000 tokens \(the longest of"):
        PerplexityTask().cells(long)
    with pytest.raises(ClearheadError, match="no document of 100,000 tokens"):
        HitsTask().cells(long)
