"""Retrieval tasks: prompts as the protocols say, scores of known answers, how answers are read."""

import re
from dataclasses import replace

import pytest
import tests_architectures as architectures
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from clearhead import ClearheadError
from clearhead.data import synthetic
from clearhead.data.synthetic import held_out
from clearhead.eval.retrieval import (
    AllocationTask,
    NeedlesTask,
    PasskeyTask,
    RecallTask,
    haystack,
    last_row,
)
from clearhead.measure.answers import Answer, Prompt, Reader
from clearhead.models import with_rope_scaling
from clearhead.records.intervals import wilson

from .conftest import greedy, log_p, numbers

TASKS = {
    "passkey": PasskeyTask(trials=3, depths=(0.0, 0.5, 1.0), new_tokens=4),
    "landmark": PasskeyTask(trials=3, depths=(0.5,), wording="landmark", new_tokens=4),
    "needles": NeedlesTask(grid=("1x1", "3x2"), samples=2, depths=(0.0, 1.0), new_tokens=4),
    "recall": RecallTask(pairs=(3, 6), queries=4, samples=3),
    "allocation": AllocationTask(samples=2, depths=(0.0, 1.0)),
}


FACT = r"The magic number of \w+ is"


class Oracle:
    """A reader that has seen the prompts and knows, or does not know, the answers."""

    def __init__(self, answer):
        self.prompts = []
        self._answer = answer

    def ask(self, prompts, *, new_tokens=0):
        self.prompts = list(prompts)
        return [self._answer(prompt.answer) for prompt in prompts]


def _knowing(answer):
    return Answer(written=answer, loss=(0.0,) * len(answer), right=(True,) * len(answer))


def _ignorant(answer):
    return Answer(written=(), loss=(1.0,) * len(answer), right=(False,) * len(answer))


def _asked(subject, task, cell, answer=_knowing):
    oracle = Oracle(answer)
    copy = replace(subject)
    copy.__dict__["reader"] = oracle
    found = numbers(task.measure(copy, cell))
    texts = [subject.tokenizer.decode(prompt.ids) for prompt in oracle.prompts]
    return found, texts, oracle


@pytest.mark.parametrize("name", ["passkey", "landmark", "needles", "recall"])
def test_one_who_knows_scores_one_and_who_does_not_zero(subject, name):
    task = TASKS[name]
    for cell in task.cells(subject):
        found, _, oracle = _asked(subject, task, cell)
        assert found["accuracy"] == 1
        assert found["answer_loss"] == 0
        if name != "recall":  # a text is an item, whatever it was asked
            texts = found["trials"] // cell.get("queries", 1)
            assert found["accuracy_by_item"] == found["forced_tokens_by_item"] == [1] * texts
        assert max(len(prompt.ids) for prompt in oracle.prompts) <= cell["length"]
        if name == "landmark":  # its prompt leads into the answer
            for prompt in oracle.prompts:
                text = subject.tokenizer.decode(prompt.ids)
                assert text.endswith("\nWhat is the pass key? The pass key is")
                assert re.fullmatch(r" \d{5}", subject.tokenizer.decode(prompt.answer))
        found, _, _ = _asked(subject, task, cell, _ignorant)
        assert found["accuracy"] == 0
        assert 0 < found["high"] < 1


def test_passkey_prompts_are_the_papers(subject):
    task = TASKS["passkey"]
    text = {}
    for cell in task.cells(subject):
        _, texts, _ = _asked(subject, task, cell)
        for one in texts:
            body = one.removeprefix("<|begin|>")
            (key,) = set(re.findall(r"\d{5}", body))
            assert held_out(key)
            assert body.startswith("There is an important info hidden inside a lot of irrelevant")
            assert body.endswith("\nWhat is the passkey?")
            assert f"The passkey is {key}. Remeber it. {key} is the passkey." in body
            before, after = (part.count("The grass is green.") for part in body.split(key, 1))
            text[cell["length"], cell["depth"]] = (before, after)
    for length in subject.lengths:
        total = sum(text[length, 0.0])
        assert text[length, 0.0] == (0, total)
        assert text[length, 1.0] == (total, 0)
        assert text[length, 0.5] == (round(total / 2), total - round(total / 2))
    assert sum(text[192, 0.0]) > sum(text[128, 0.0])


def test_needles_stand_at_their_depth_and_all_lengths_are_exact(subject):
    for depth in (0.0, 0.5, 1.0):
        asked = haystack(subject, "x", length=192, depth=depth, needles=3, queries=2)
        prompts, keys, places = zip(*asked, strict=True)
        assert max(len(prompt.ids) for prompt in prompts) == 192
        context = prompts[0].context
        for key, place in zip(keys, places, strict=True):
            assert subject.decode(context).count(key) == 1
            assert re.fullmatch(rf"{FACT} {key}\.", subject.decode(context[place]).strip())
        assert places[0].stop == places[1].start  # side by side
        before, filler = (
            len(re.sub(rf"{FACT} \d+\.", "", subject.decode(ids)))
            for ids in (context[: places[0].start], context)
        )
        assert abs(before / filler - depth) < 0.15


def test_needles_are_asked_one_by_one_after_one_context(subject):
    cell = {"length": 192, "depth": 0.0, "needles": 3, "queries": 2}
    _, texts, oracle = _asked(subject, TASKS["needles"], cell)
    assert len(texts) == 4
    assert oracle.prompts[0].context == oracle.prompts[1].context != oracle.prompts[2].context
    for text, prompt in zip(texts, oracle.prompts, strict=True):
        city = re.search(r"What is the magic number of (\w+)\?", text)[1]
        number = re.search(rf"The magic number of {city} is (\d+)\.", text)[1]
        assert subject.tokenizer.decode(prompt.answer) == f" {number}"


def test_recall_asks_for_values_that_were_listed(subject):
    cell = {"length": 192, "pairs": 6}
    _, texts, oracle = _asked(subject, TASKS["recall"], cell)
    for text, prompt in zip(texts, oracle.prompts, strict=True):
        assert text.endswith(" Recall:")
        for pair in subject.tokenizer.decode(prompt.answer).split(",")[:-1]:
            assert f"{pair}," in text or f"{pair}." in text
            assert held_out(pair.strip())


@pytest.mark.parametrize("name", ["differential", "coca"])
def test_scores_do_not_depend_on_the_batch(make_subject, name):
    one, many = (make_subject(name, batch_tokens=n, lengths=(128,)) for n in (1, 4000))
    for subject in (one, many):
        subject.model.double()
    for task in TASKS.values():
        for cell in task.cells(one)[:2]:
            alone, together = (numbers(task.measure(s, cell)) for s in (one, many))
            by_item = [{k: r.pop(k) for k in list(r) if "by_item" in k} for r in (alone, together)]
            assert by_item[0] == by_item[1]
            assert alone.pop("headlines") == together.pop("headlines")
            assert alone == pytest.approx(together, rel=1e-5)


def test_wilson_against_published_values():
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@pytest.mark.parametrize("name", ["softmax1", "differential", "coca"])
def test_allocation_is_the_last_row_of_the_whole_map(make_subject, name):
    subject = make_subject(name, lengths=(128,))
    subject.model.set_attn_implementation("eager")
    ((prompt, _, _),) = haystack(subject, "x", length=128, depth=0.5, needles=2, queries=1)
    with torch.no_grad():
        ids = torch.tensor([prompt.ids])
        maps = subject.model(ids, output_attentions=True, use_cache=False).attentions
    absolute_S = torch.stack([layer[0, :, -1].double().abs().sum(0) for layer in maps]).sum(0)
    subject.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(last_row(subject, prompt), absolute_S, rtol=1e-4, atol=1e-5)


def test_allocation_under_dynamic_scaling_follows_no_earlier_text(make_subject, corpus):
    size = {"vocab_size": corpus.vocabulary_size, "max_position_embeddings": 64}
    model = with_rope_scaling(architectures.make("Llama", **size), "dynamic", factor=4).eval()
    subject, cell = make_subject(model=model, lengths=(128,)), {"length": 128, "depth": 0.0}
    first = TASKS["allocation"].measure(subject, cell)
    with torch.no_grad():
        model(torch.zeros(1, 300, dtype=torch.int64))  # whose frequencies transformers keeps
    assert TASKS["allocation"].measure(subject, cell) == first


@pytest.mark.parametrize(
    ("task", "lengths", "message"),
    [
        (PasskeyTask(), (16, 128), r"takes \d+ tokens without any filler: more than the length 16"),
        (NeedlesTask(grid=("1x2",)), (128,), "grid '1x2' is not NxR"),
        (NeedlesTask(grid=("6x1",)), (40,), "6 needles and a question take"),
        (RecallTask(pairs=(40,)), (64,), "tokens, more than the length 64"),
        (RecallTask(pairs=(0,)), (128,), "pairs is 0"),
    ],
)
def test_refuses_at_once_what_cannot_be_measured(make_subject, task, lengths, message):
    with pytest.raises(ClearheadError, match=message):
        task.cells(make_subject(lengths=lengths))


@pytest.mark.parametrize("name", ["passkey", "needles", "recall", "allocation"])
def test_learned_positions_are_refused_at_once(make_subject, name):
    with pytest.raises(ClearheadError, match="64 learned positions"):
        TASKS[name].cells(make_subject("gpt2"))


def test_positions_that_cannot_be_told_apart_are_refused_at_once(make_subject):
    """Not after reading 64K tokens: what is written after the prompt counts too."""
    limit = 65_536
    task = NeedlesTask(grid=("1x1",), depths=(0.5,), new_tokens=10)
    with pytest.raises(ClearheadError, match=f"{limit:,} positions of 'alibi'"):
        task.cells(make_subject("alibi", lengths=(limit - 9,)))
    task.cells(make_subject("alibi", lengths=(limit - 10,)))


def _spelling(kind, texts):
    """A tokenizer that begins every text with "▁" as Mistral's and Phi-3's does, or as Llama's."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces = [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    bpe.decoder = decoders.Metaspace()
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        bpe.normalizer, bpe.pre_tokenizer = normalizers.Sequence(steps), None
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["byte-level", "prepend", "metaspace"])
def test_an_answer_has_the_tokens_that_it_has_in_the_text(make_subject, kind):
    """So that copying them is the right answer; and a text those of its pieces."""
    texts = [t for k in ("needle", "recall", "passkey") for t in synthetic.texts(f"synthetic:{k}")]
    changes = {} if kind == "byte-level" else {"tokenizer": _spelling(kind, texts[::9])}
    subject = make_subject(**changes)
    fact = "The magic number of Rome is 12345."
    read, answer = subject.ids(f"{fact}\nWhat is it? The magic number of Rome is", " 12345")
    assert any(read[at : at + len(answer)] == answer for at in range(len(read)))
    pieces = ["A b", "", " 12", "\n", "\n12", " 3."]
    found = subject.ids(*pieces)
    assert [one for ids in found for one in ids] == list(subject.ids("".join(pieces))[0])
    assert subject.tokenizer.decode(found[2]).strip() == "12"
    assert found[1] == ()


VOCABULARY, TRAINED = architectures.VOCABULARY, 16
CLEARHEAD = (
    *("transformer", "differential", "differential-v2", "softmax1", "sink"),
    *("alibi", "xpos", "coca", "coca-strict", "coca-slack", "key-bias"),
)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}


def _make(name: str) -> torch.nn.Module:
    name, _, kind = name.partition(" ")
    if name == "Llama":
        rope = {"rope_parameters": DYNAMIC} if kind else {}
        return architectures.make(name, max_position_embeddings=TRAINED, **rope)
    model = architectures.make(name, max_position_embeddings=64 if name == "GPT-2" else TRAINED)
    return with_rope_scaling(model, kind, factor=4) if kind else model


def _prompts() -> list[Prompt]:
    """Two long shared starts, contexts inside them, tails and answers of several lengths, one
    unlike all."""
    start = torch.randint(0, VOCABULARY, (26,)).tolist()
    other = [*start[:9], *torch.randint(0, VOCABULARY, (12,)).tolist()]
    found = []
    contexts = (start, start[:13], other, start, [], other[:4])
    for context, size in zip(contexts, (3, 1, 0, 2, 4, 2), strict=True):
        ids = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in (1 + len(found) % 4, size)]
        found.append(Prompt(*map(tuple, (context, *ids))))
    return found


BATCHES = [(name, 70) for name in (*CLEARHEAD, "coca linear", "Llama", "GPT-2")]
BATCHES += [(name, size) for name in ("differential", "Llama") for size in (1, 10_000)]


@pytest.mark.parametrize(("name", "batch_tokens"), BATCHES)
def test_equals_whole_forward_passes_one_by_one(name, batch_tokens):
    model = _make(name).double().eval()
    reader = Reader(model, batch_tokens=batch_tokens)
    assert reader.shares
    prompts = _prompts()
    found = reader.ask(prompts, new_tokens=5)
    alike = [prompts[0]._replace(answer=prompt.answer) for prompt in prompts]
    for prompt, mine in zip([*prompts, *alike], [*found, *reader.ask(alike)], strict=True):
        likely = log_p(model, [*prompt.ids, *prompt.answer], len(prompt.answer))
        assert mine.loss == pytest.approx([-one for one in likely], rel=2e-6, abs=2e-6)
    for prompt, mine in zip(prompts, found, strict=True):
        assert mine.written == greedy(model, prompt.ids, 5)
        assert all(mine.right) == (mine.written[: len(prompt.answer)] == prompt.answer)
    # What was kept of one batch serves the next.
    again = reader.ask(prompts, new_tokens=5)
    assert [a.written for a in again] == [a.written for a in found]


@pytest.mark.parametrize("name", ["transformer dynamic", "coca dynamic", "Llama dynamic"])
def test_under_dynamic_scaling_nothing_is_shared_and_batches_change_nothing(name):
    model = _make(name).double().eval()
    prompts = [prompt._replace(answer=(1, 2)) for prompt in _prompts()]
    alone = Reader(model, batch_tokens=1).ask(prompts, new_tokens=4)
    reader = Reader(model, batch_tokens=10_000)
    assert not reader.shares
    together = reader.ask(prompts, new_tokens=4)
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.written == other.written
        with torch.no_grad():  # the first token's base is that of the prompt's own length
            if name.startswith("Llama"):
                model(torch.tensor([[0]]))  # transformers keeps the longest text's frequencies
            logits = model(torch.tensor([prompt.ids]), use_cache=False).logits[0, -1]
        assert one.loss[0] == pytest.approx(-float(logits.log_softmax(-1)[1]), rel=1e-5)


def test_an_answer_ends_at_the_end_token():
    model = _make("transformer").eval()
    prompts = _prompts()
    free = Reader(model, batch_tokens=1000).ask(prompts, new_tokens=6)
    end = free[0].written[2]
    stopped = Reader(model, batch_tokens=1000, ends=[end]).ask(prompts, new_tokens=6)
    for one, other in zip(free, stopped, strict=True):
        cut = one.written.index(end) if end in one.written else 6
        assert other.written == one.written[:cut]


def test_what_is_shared_is_read_once():
    model = _make("transformer").eval()
    reader = Reader(model, batch_tokens=100_000)
    read = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    start = tuple(torch.randint(0, VOCABULARY, (200,)).tolist())
    other = tuple(reversed(start))
    for prompts, tokens in (
        ([Prompt(start[:190], (n, n + 1)) for n in range(8)], 190 + 8 * 2),
        ([Prompt(start, (3,), (n,)) for n in range(2)], 10 + 2),  # grows what is kept
        ([Prompt(start[:50], (3,))], 1),
        ([Prompt((*start[:50], 3, 4), (5,))], 2 + 1),  # leaves it early
        ([Prompt(other, (3,))], 200 + 1),  # another text altogether
        ([Prompt(other, (4,))], 1),
    ):
        read.clear()
        reader.ask([prompt._replace(answer=prompt.answer or (1,)) for prompt in prompts])
        assert sum(read) == tokens


def test_refuses_a_model_without_a_key_value_cache():
    config = MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1)
    with pytest.raises(ClearheadError, match="MambaForCausalLM has no key-value cache"):
        Reader(MambaForCausalLM(config).eval(), batch_tokens=8)
