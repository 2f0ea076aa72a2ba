"""Answers against whole forward passes of one prompt; sharing and batches change nothing."""

import pytest
import tests_architectures as architectures
import torch
from transformers import MambaConfig, MambaForCausalLM

from clearhead import ClearheadError
from clearhead.measure.answers import Prompt, Reader
from clearhead.models import with_rope_scaling

from .conftest import greedy, log_p

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
    """Two long shared starts, contexts inside them, tails of several lengths, one unlike all."""
    start = torch.randint(0, VOCABULARY, (26,)).tolist()
    other = [*start[:9], *torch.randint(0, VOCABULARY, (12,)).tolist()]
    found = []
    for context in (start, start[:13], other, start, [], other[:4]):
        tail = torch.randint(0, VOCABULARY, (1 + len(found) % 4,)).tolist()
        found.append(Prompt(tuple(context), tuple(tail)))
    return found


BATCHES = [(name, 70) for name in (*CLEARHEAD, "coca linear", "Llama", "GPT-2")]
BATCHES += [(name, size) for name in ("differential", "Llama") for size in (1, 10_000)]


@pytest.mark.parametrize(("name", "batch_tokens"), BATCHES)
def test_equals_whole_forward_passes_one_by_one(name, batch_tokens):
    model = _make(name).double().eval()
    reader = Reader(model, batch_tokens=batch_tokens)
    assert reader.shares
    prompts = _prompts()
    answers = [tuple(torch.randint(0, VOCABULARY, (n,)).tolist()) for n in (3, 1, 0, 2, 4, 2)]
    found = reader.ask(prompts, answers, new_tokens=5)
    for prompt, answer, mine in zip(prompts, answers, found, strict=True):
        likely = log_p(model, [*prompt.ids, *answer], len(answer))
        assert mine.loss == pytest.approx([-one for one in likely], rel=2e-6, abs=2e-6)
        assert mine.written == greedy(model, prompt.ids, 5)
        assert all(mine.right) == (mine.written[: len(answer)] == answer)
    for answer, mine in zip(answers, reader.ask([prompts[0]] * 6, answers), strict=True):
        likely = log_p(model, [*prompts[0].ids, *answer], len(answer))
        assert -sum(mine.loss) == pytest.approx(sum(likely), rel=2e-6, abs=2e-6)
    # What was kept of one batch serves the next.
    again = reader.ask(prompts, answers, new_tokens=5)
    assert [a.written for a in again] == [a.written for a in found]


@pytest.mark.parametrize("name", ["transformer dynamic", "coca dynamic", "Llama dynamic"])
def test_under_dynamic_scaling_nothing_is_shared_and_batches_change_nothing(name):
    model = _make(name).double().eval()
    prompts = _prompts()
    answers = [(1, 2)] * len(prompts)
    alone = Reader(model, batch_tokens=1).ask(prompts, answers, new_tokens=4)
    reader = Reader(model, batch_tokens=10_000)
    assert not reader.shares
    together = reader.ask(prompts, answers, new_tokens=4)
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
    free = Reader(model, batch_tokens=1000).ask(prompts, [()] * 6, new_tokens=6)
    end = free[0].written[2]
    stopped = Reader(model, batch_tokens=1000, ends=[end]).ask(prompts, [()] * 6, new_tokens=6)
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
        ([Prompt(start, (3,))] * 2, 10 + 2),  # grows what is kept; one context for both
        ([Prompt(start[:50], (3,))], 1),
        ([Prompt((*start[:50], 3, 4), (5,))], 2 + 1),  # leaves it early
        ([Prompt(other, (3,))], 200 + 1),  # another text altogether
        ([Prompt(other, (4,))], 1),
    ):
        read.clear()
        reader.ask(prompts, [(1,)] * len(prompts))
        assert sum(read) == tokens


def test_refuses_a_model_without_a_key_value_cache():
    config = MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1)
    with pytest.raises(ClearheadError, match="MambaForCausalLM has no key-value cache"):
        Reader(MambaForCausalLM(config).eval(), batch_tokens=8)
