"""Perplexity and loss at hidden tokens, against the cross-entropy of whole logits."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tests_architectures as architectures
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import ClearheadError
from clearhead.data import Corpus, DataConfig, TokenStream, prepare, with_mask_token
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.eval import sliding as file_of_sliding
from clearhead.eval.perplexity_task import HitsTask, MaskedTask, PerplexityTask, hits
from clearhead.eval.sliding import lengths, perplexity, sliding, windows_of
from clearhead.lab.measuring import measure
from clearhead.lab.sweep_configs import EvaluateConfig
from clearhead.measure.sweep import Texts
from clearhead.models import with_rope_scaling
from clearhead.records.jsonl import append

from .conftest import numbers

VOCABULARY, LONGEST = architectures.VOCABULARY, architectures.LENGTH


def _make(name: str) -> nn.Module:
    # Cohere's logits are scaled after the head.
    return architectures.make(name, **({"logit_scale": 0.25} if name == "Cohere" else {}))


def _windows(count: int, length: int) -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (count, length)))


def _by_hand(model: nn.Module, windows: list[Tensor]) -> float:
    ids = torch.stack(windows)
    with torch.no_grad():
        logits = model(ids).logits.double()[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Five rows of logits at a time."""
    monkeypatch.setattr(file_of_sliding, "LOGITS", 5 * VOCABULARY + 3)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("prefix", [(), (7, 8)])
@pytest.mark.parametrize(
    "name", ["transformer", "differential", "softmax1", "gpt2", "Llama", "GPT-2", "Cohere"]
)
def test_is_exp_of_the_mean_cross_entropy(small_parts, name, prefix, batch_size):
    model, windows = _make(name).double(), _windows(4, 13)
    ids = torch.cat([torch.tensor(prefix).expand(4, -1).long(), torch.stack(windows)], 1)
    with torch.no_grad():
        logits = model(ids).logits[:, len(prefix) : -1]
    target = ids[:, len(prefix) + 1 :].flatten()
    expected = F.cross_entropy(logits.flatten(0, 1), target).item()
    result = perplexity(model, iter(windows), batch_size=batch_size, prefix=prefix)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert (result.tokens, result.reason) == (4 * 12, None)


@pytest.mark.parametrize(
    ("name", "by_parts"), [("Llama", True), ("GPT-2", True), ("Cohere", False)]
)
def test_only_plain_heads_are_called_by_parts(small_parts, name, by_parts):
    model, rows = _make(name), []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, out: rows.append(out[..., 0].numel()))
    perplexity(model, _windows(2, LONGEST), batch_size=2)
    if by_parts:  # after the trial on two tokens
        assert rows[:2] == [2, 2]
        assert max(rows[2:]) == 5
        assert sum(rows[2:]) == 2 * (LONGEST - 1)
    else:
        assert rows[2:] == [2 * LONGEST]


@pytest.mark.parametrize("name", ["gpt2", "GPT-2"])
def test_learned_positions_end(name):
    model = _make(name)
    assert perplexity(model, _windows(1, LONGEST), batch_size=1).loss is not None
    beyond = perplexity(model, _windows(1, LONGEST + 1), batch_size=1)
    assert (beyond.loss, beyond.perplexity, beyond.tokens) == (None, None, 0)
    assert beyond.reason == "the model has 32 learned positions, too few for 33 tokens"


def test_mode_is_evaluation_and_then_restored():
    model, windows = _make("GPT-2"), _windows(2, 9)
    expected = perplexity(model, windows, batch_size=1).loss
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert perplexity(model, windows, batch_size=1).loss == expected
    assert [module.training for module in model.modules()] == before


def test_hopeless_and_broken_models_have_numbers_too():
    model = _make("Llama")
    model.lm_head.weight.data.mul_(1e5)
    result = perplexity(model, _windows(1, 9), batch_size=1)
    assert math.isfinite(result.loss)
    assert result.perplexity == math.inf
    model.lm_head.weight.data.fill_(torch.nan)
    assert math.isnan(perplexity(model, _windows(1, 9), batch_size=1).perplexity)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "no windows"),
        ([torch.full((9,), -1)], "token ids from -1 to -1"),
        ([torch.full((9,), VOCABULARY)], "use the tokenizer that the model was trained with"),
    ],
)
def test_refuses(windows, message):
    with pytest.raises(ClearheadError, match=message):
        perplexity(_make("Llama"), windows, batch_size=2)


def _corpus(*sizes: int) -> Corpus:
    draw = np.random.default_rng(0)
    tokens = (draw.integers(0, VOCABULARY, size).astype(np.uint16) for size in sizes)
    about = {"weight": None, "starts": np.zeros(1, dtype=np.int64)}
    streams = tuple(TokenStream(spec=str(n), tokens=one, **about) for n, one in enumerate(tokens))
    split = dict.fromkeys(("train", "validation"), streams)
    return Corpus(tokenizer=None, vocabulary_size=VOCABULARY, fingerprint="", streams=split)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("budget", "read"), [(10_000, 192), (129, 128), (128, 128), (127, 64)])
def test_lengths_read_the_same_text(budget, read, apart):
    """205 tokens hold three windows of 64: 192 tokens at every length."""
    model, tokenizer = _make("transformer"), SimpleNamespace(eos_token_id=3, bos_token_id=None)
    corpus = replace(_corpus(205), tokenizer=tokenizer)
    found = lengths(model, corpus, lengths=(8, 16, 64), tokens=budget, documents_apart=apart)
    assert [line["length"] for line in found] == [8, 8, 16, 16, 64, 64]
    for line in found:
        length = line["length"]
        tokens = torch.from_numpy(corpus.split("validation")[0].tokens.astype(np.int64))
        cut, told = tokens[:read].split(length), tokenizer if apart else None
        expected = perplexity(model, cut, batch_size=2, tokenizer=told)
        assert line["predicted_tokens"] == expected.tokens
        assert apart or expected.tokens == read // length * (length - 1)
        assert line["value"] == pytest.approx(getattr(expected, line["metric"]), rel=1e-6)
        assert line["split"] == "validation"
        assert "reason" not in line


@pytest.mark.parametrize("name", ["transformer", "differential", "alibi", "sas"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_documents_kept_apart_are_read_each_by_itself(small_parts, name, batch_size):
    """As each document's part of a window alone, whose first token nothing predicts."""
    model, windows, end = _make(name), _windows(4, 29), 3
    windows[0][[0, 4, 5, 28]] = end  # one of a single token, and one that a window's end cuts off
    windows[1][:] = torch.where(windows[1] == end, 0, windows[1])  # a window within one document
    tokenizer = SimpleNamespace(eos_token_id=end, bos_token_id=None)
    total = count = 0.0
    for window in windows:
        closes = [-1, *(window == end).nonzero().flatten().tolist(), len(window) - 1]
        for before, last in itertools.pairwise(closes):
            part = window[before + 1 : last + 1]
            if len(part) > 1:
                total += _by_hand(model, [part]) * (len(part) - 1)
                count += len(part) - 1
    found = perplexity(model, windows, batch_size=batch_size, tokenizer=tokenizer)
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.loss != perplexity(model, windows, batch_size=batch_size).loss


def test_windows_that_foretell_nothing_have_a_reason():
    tokenizer = SimpleNamespace(eos_token_id=3, bos_token_id=None)
    windows = [torch.tensor([3, 5]), torch.tensor([3, 3])]
    found = perplexity(_make("transformer"), windows, batch_size=2, tokenizer=tokenizer)
    assert found.loss is None
    assert found.reason == "no window holds a token that another of its document foretells"


def test_lengths_that_cannot_be_measured():
    lines = lengths(_make("gpt2"), _corpus(100), lengths=(16, 64, 128), tokens=10_000)
    assert [line["value"] is None for line in lines] == [False] * 2 + [True] * 4
    assert lines[2]["reason"] == "the model has 32 learned positions, too few for 64 tokens"
    assert "the validation split's 100 hold no window of 128" in lines[5]["reason"]
    lines = lengths(_make("gpt2"), _corpus(100), lengths=(16, 64), tokens=15)
    assert all("the 15 tokens to read of" in line["reason"] for line in lines)


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


def test_texts_shorter_than_the_window_are_named(make_subject, corpus):
    long = make_subject(lengths=(128, 100_000))
    with pytest.raises(ClearheadError, match=r"no document of 100,000 tokens \(the longest of"):
        PerplexityTask().cells(long)
    with pytest.raises(ClearheadError, match="no document of 100,000 tokens"):
        HitsTask().cells(long)
    held_out = Texts(lambda: corpus, ("validation",))
    with pytest.raises(ClearheadError, match="enough for one window of 100000"):
        MaskedTask().cells(replace(long, texts=held_out))


def test_the_loss_of_another_text_is_another_cell(tmp_path):
    tokenizer = train_tokenizer(["good bad film plot"] * 30, 290)
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for file, words in zip(files, ("good film", "bad plot"), strict=True):
        append(file, *({"text": f"{words} " * n} for n in range(9, 60)))
    data = DataConfig(data=(str(files[0]),), validation=0.4)
    corpus = with_mask_token(prepare(data, tokenizer=tokenizer, progress=str))
    torch.manual_seed(0)
    model = architectures.make("bert", vocab_size=corpus.vocabulary_size)
    model.save_pretrained(tmp_path / "model")
    corpus.tokenizer.save_pretrained(tmp_path / "model")
    few = {"lengths": (16,), "tokens": 256, "records": tmp_path / "records.jsonl"}
    asked = EvaluateConfig(models=(str(tmp_path / "model"),), data=data, **few)

    def loss(config) -> float:
        lines = measure(config)
        (value,) = (line["value"] for line in lines if line.get("metric") == "masked_loss")
        return value

    first = loss(asked)
    other = replace(asked, data=replace(data, data=(str(files[1]),)))
    assert loss(other) != first
    assert loss(asked) == first
