"""Models that read a begin token first in every training window are measured behind it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import tests_architectures as architectures
import torch
from transformers import AutoModelForCausalLM

from clearhead import ClearheadError
from clearhead.data import Batches, Corpus
from clearhead.data.corpus import TokenStream
from clearhead.diagnose import diagnose
from clearhead.eval.harness import harness_model
from clearhead.eval.perplexity_task import HitsTask
from clearhead.eval.sliding import distance, perplexity, sliding
from clearhead.measure.sweep import Document
from clearhead.models.configuration import WINDOW_BEGIN
from clearhead.models.conversion import converted, for_serving
from clearhead.models.starts import started
from clearhead.quantize.measure import Texts, cost
from clearhead.train import TrainConfig, train

from .conftest import greedy, log_p, numbers

BEGIN = 3


@pytest.fixture(scope="module")
def models():
    """A model, and the same weights after training behind the begin token."""
    torch.manual_seed(1)
    plain = architectures.make("transformer").eval()
    begun = copy.deepcopy(plain)
    setattr(begun.config, WINDOW_BEGIN, BEGIN)
    return plain, begun


@pytest.fixture
def texts():
    return torch.randint(4, architectures.VOCABULARY, (3, 12), generator=torch.manual_seed(0))


def _opened(texts):
    return torch.cat([torch.full_like(texts[:, :1], BEGIN), texts[:, 1:]], 1)


def _by_sliding(model, texts):
    """One text, in windows that overlap."""
    document = texts.flatten().numpy()
    found = sliding(model, [document], length=12, stride=12, batch_tokens=24)
    return [(one.start, one.position, one.loss.tolist()) for one in found]


MEASUREMENTS = (
    lambda model, texts: perplexity(model, texts, batch_size=2),
    _by_sliding,
    lambda model, texts: diagnose(model, texts, batch_size=2).measures,
    lambda model, texts: cost(model, None, Texts(windows=list(texts))),
    lambda model, texts: distance(model, model, texts),
)


@pytest.mark.parametrize("measured", MEASUREMENTS)
def test_every_window_opens_with_the_begin_token_and_as_many_tokens_are_predicted(
    measured, models, texts
):
    plain, begun = models
    before = texts.clone()
    assert measured(begun, texts) == measured(plain, _opened(texts))
    assert measured(begun, texts) != measured(plain, texts)
    assert torch.equal(texts, before)
    assert perplexity(begun, texts, batch_size=2).tokens == 3 * 11


def test_the_token_that_gave_its_place_counts_as_context_of_no_window(models):
    """Windows that overlap predict every token of a text but the first, also behind a begin
    token."""
    plain, begun = models
    document = np.arange(4, 44, dtype=np.uint16)
    found = [
        [(one.start, one.position, len(one.loss)) for one in windows]
        for windows in (sliding(m, [document], length=8, stride=4, batch_tokens=8) for m in models)
    ]
    assert found[0] == found[1]
    assert sum(count for _, _, count in found[1]) == 39
    windows = sliding(begun, [document], length=8, stride=4, batch_tokens=8)
    (last,) = (one for one in windows if one.start == 32)
    ids = torch.tensor([[BEGIN, *range(37, 44)]])
    with torch.no_grad():
        expected = -plain(ids).logits.log_softmax(-1)[0, 3:-1].gather(1, ids[0, 4:, None])[:, 0]
    assert last.loss == pytest.approx(expected.numpy(), rel=1e-5)


def test_a_begin_token_ends_no_repetition(models):
    """A hit that only the replaced token makes cannot be looked up."""
    document = np.array([9, 10, 11, 12, 9, 10, 13, 14], dtype=np.uint16)
    streams = [Document("s", document)]
    for model, hits in zip(models, (1, 0), strict=True):
        sizes = {"lengths": (8,), "tokens": 8, "batch_tokens": 8}
        subject = SimpleNamespace(model=model, texts=SimpleNamespace(streams=streams), **sizes)
        line = numbers(HitsTask().measure(subject, {"length": 8}))
        assert (line["ar_hits"], line["predicted_tokens"]) == (hits, 7)


def _batches(begin):
    ids = np.arange(400, dtype=np.uint32) % 50 + 4
    stream = TokenStream(spec="s", weight=None, tokens=ids, starts=np.zeros(1, np.int64))
    corpus = Corpus(
        tokenizer=None,
        vocabulary_size=architectures.VOCABULARY,
        fingerprint="",
        streams={"train": (stream,), "validation": (stream,)},
    )
    return Batches(corpus, sequence_length=8, batch_size=2, seed=0, begin=begin)


def test_training_writes_the_begin_token_into_the_model_and_takes_it_out(tmp_path):
    settings = TrainConfig(tokens=32, sequence_length=8, batch_size=2, precision="fp32")
    model = architectures.make("Llama")
    for name, begin in (("plain", None), ("begun", BEGIN), ("again", None)):
        train(model, _batches(begin), settings, output=tmp_path / name)
        folder = tmp_path / name / "final"
        assert (WINDOW_BEGIN in (folder / "config.json").read_text()) == (begin is not None)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert getattr(model.config, WINDOW_BEGIN, None) == begin


def test_a_conversion_keeps_the_begin_token(models, tmp_path):
    _, begun = models
    llama = converted(begun)
    for made in (llama, converted(llama), started(begun, {"epilogue": "gate"}).model):
        assert getattr(made.config, WINDOW_BEGIN) == BEGIN
        made.save_pretrained(tmp_path)
        opened = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert getattr(opened.config, WINDOW_BEGIN) == BEGIN
    gated = started(begun, {"epilogue": "gate"}).model
    assert getattr(for_serving(gated).config, WINDOW_BEGIN) == BEGIN


@pytest.mark.parametrize("wrong", ["3", 99, -1])
def test_a_begin_token_that_is_none_is_refused(wrong, models, texts):
    model = copy.deepcopy(models[0])
    setattr(model.config, WINDOW_BEGIN, wrong)
    with pytest.raises(ClearheadError, match=rf"window_begin_token_id .* {wrong!r}, no token"):
        perplexity(model, texts, batch_size=2)


@pytest.fixture
def pair(make_subject, corpus):
    """A model with 64 positions, and lm-eval's wrapper of the same weights after training behind
    the begin token."""
    pytest.importorskip("lm_eval")
    plain = make_subject().model
    begun = copy.deepcopy(plain)
    setattr(begun.config, WINDOW_BEGIN, corpus.tokenizer.bos_token_id)
    subject = SimpleNamespace(model=begun, tokenizer=corpus.tokenizer, batch_tokens=64)
    with harness_model(subject) as lm:
        yield plain, lm


TEXT = "The ship left the harbour. "


def _ids(corpus, text):
    return corpus.tokenizer(text, add_special_tokens=False).input_ids


def _request(*words):
    return SimpleNamespace(args=words, task_name="t")


def test_a_prompt_of_lm_eval_opens_with_the_begin_token_and_is_cut_behind_it(pair, corpus):
    plain, lm = pair
    asked = [(TEXT[:-1], " Nobody saw it"), (TEXT[:-1] * 20, " again!"), ("", " A letter")]
    scores = lm.loglikelihood([_request(*one) for one in asked])
    for (context, answer), (score, _) in zip(asked, scores, strict=True):
        ids = _ids(corpus, context + answer)
        count = len(ids) - len(_ids(corpus, context))
        expected = sum(log_p(plain, [corpus.tokenizer.bos_token_id, *ids[-64:]], count))
        assert score == pytest.approx(expected, rel=1e-4)


def test_windows_of_a_text_in_lm_eval_open_with_the_begin_token(pair, corpus):
    plain, lm = pair
    (score,) = lm.loglikelihood_rolling([_request(TEXT * 20)])
    ids = _ids(corpus, TEXT * 20)
    expected = 0.0
    for done in range(0, len(ids), 64):
        rest = min(64, len(ids) - done)
        window = ids[max(0, done + rest - 64) : done + rest]
        expected += sum(log_p(plain, [corpus.tokenizer.bos_token_id, *window], rest))
    assert score == pytest.approx(expected, rel=1e-4)


def test_a_prompt_to_continue_that_is_cut_opens_with_the_begin_token(pair, corpus):
    plain, lm = pair
    (written,) = lm.generate_until([_request(TEXT * 20, {"max_gen_toks": 4, "until": []})])
    ids = [corpus.tokenizer.bos_token_id, *_ids(corpus, TEXT * 20)[-59:]]
    found = greedy(plain, ids, 4)
    assert written == corpus.tokenizer.decode(found, skip_special_tokens=True)
