"""Likelihoods of continuations: against whole rows in float64, at every batch size."""

import copy

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.eval.continuations import Row, encode_pairs, log_likelihoods
from clearhead.eval.prefill import Prefill


class Letters:
    """A tokenizer of single characters, with a begin token if any."""

    def __init__(self, begin: int | None = None) -> None:
        self._begin = [] if begin is None else [begin]

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [self._begin + [ord(one) % 59 for one in text] for text in texts]}


def _questions() -> list[list[Row]]:
    """Of odd lengths: shared contexts, contexts that part early (WinoGrande), one token each."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, architectures.VOCABULARY, (count,), generator=draw).tolist())

    start, end, same, alike = ids(5), ids(4), ids(11), ids(6)
    return [
        [Row(same, ids(size)) for size in (3, 1, 7, 4)],
        [Row((*start, *ids(2)), end), Row((*start, *ids(5)), end)],
        [Row(ids(3), ids(2)), Row(ids(1), ids(9))],
        [Row(same[:7], ids(1)), Row(same[:7], ids(1))],
        [Row(same, (5,)), Row(same, (6,)), Row(same[:9], (*same[9:], 7)), Row(same, (5, 6))],
        [Row(same[:1], ids(3)), Row(same[:1], ids(2)), Row(same[:1], ids(20))],
        # Answers that start alike, one of them the start of others, one with a longer context.
        [Row(same, (*alike, *ids(size))) for size in (3, 9, 0)],
        [Row(same, (*alike, *end)), Row((*same, *alike[:2]), (*alike[2:], *end[:2], 1, 2))],
        [Row(same, (*alike, 1)), Row(same, (*alike, 2)), Row(same, (*alike, 3, 4))],
    ]


def _naive(model, row: Row) -> float:
    """One whole row alone, in float64: all but its last token are read."""
    wide = copy.deepcopy(model).double()
    ids = (*row.context, *row.continuation)
    with torch.no_grad():
        logs = wide(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    first = len(row.context)
    return sum(float(logs[at - 1, ids[at]]) for at in range(first, len(ids)))


def _dynamic() -> ClearheadForCausalLM:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    ids = {k: v for k, v in architectures.SHAPE.items() if not k.endswith("_token_id")}
    shape = ids | {"max_position_embeddings": 8}
    return ClearheadForCausalLM(preset("transformer", rope_parameters=rope, **shape)).eval()


def _transformers_dynamic():
    model = architectures.make("Llama")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = rope, 8
    return type(model)(config).eval()


MODELS = {
    **{
        name: lambda name=name: architectures.make(name)
        for name in ("Llama", "Mistral", "Gemma2", "GPT-2", "Bloom", "differential", "sink")
    },
    "coca": lambda: ClearheadForCausalLM(
        preset(
            "coca", **{k: v for k, v in architectures.SHAPE.items() if not k.endswith("token_id")}
        )
    ).eval(),
    "dynamic": _dynamic,
    "dynamic of transformers": _transformers_dynamic,
}


@pytest.mark.parametrize("name", MODELS)
def test_likelihoods_are_those_of_whole_rows_at_every_batch_size(name):
    torch.manual_seed(0)
    model, questions = MODELS[name](), _questions()
    expected = [[_naive(model, row) for row in rows] for rows in questions]
    for batch_tokens in (1, 60, 10_000):
        done: list[int] = []
        with torch.no_grad():
            prefill = Prefill(model)
        found = log_likelihoods(
            model, prefill, questions, batch_tokens=batch_tokens, advanced=done.append
        )
        assert sum(done) == sum(map(len, questions))
        for row, wanted in zip(found, expected, strict=True):
            assert row == pytest.approx(wanted, abs=2e-4, rel=2e-5)


def test_what_a_question_shares_is_read_once():
    model = architectures.make("Llama")
    context = tuple(range(20))
    rows = [Row(context, (30 + n, 40)) for n in range(4)]
    with torch.no_grad():
        prefill = Prefill(model)
    one_token = [Row(context, (30 + n,)) for n in range(4)]
    for asked, expected in (
        # All but the context's last token once; that and a first answer token by choice.
        (rows, 19 + 4 * 2),
        # Answers of one token: all of them after one reading.
        (one_token, 19 + 1),
        ([*one_token, rows[0]], 19 + 1 + 2),
        # Answers that start alike: their start once too.
        ([Row(context, (30, 31, 32, 33 + n, 40)) for n in range(4)], 19 + 4 + 4),
    ):
        log_likelihoods(model, prefill, [asked], batch_tokens=1000, advanced=lambda _count: None)
        read, made = [], []
        hooks = [
            model.model.register_forward_pre_hook(
                lambda _model, _args, kwargs, read=read: read.append(kwargs["input_ids"].numel()),
                with_kwargs=True,
            ),
            model.lm_head.register_forward_hook(
                lambda _head, _args, out, made=made: made.append(out.shape[:-1].numel())
            ),
        ]
        log_likelihoods(model, prefill, [asked], batch_tokens=1000, advanced=lambda _count: None)
        for hook in hooks:
            hook.remove()
        assert sum(read) <= expected + 1  # one of padding
        assert sum(made) <= sum(len(row.continuation) for row in asked) + 2


@pytest.mark.parametrize("shared", [0, 2])
def test_of_a_row_only_what_others_share_is_kept(shared):
    model = architectures.make("Llama")
    with torch.no_grad():
        kept, _ = Prefill(model).begin([(1, 2, 3, 4, 5)], [shared])
    assert kept.rows == [(1, 2, 3, 4, 5)[:shared]]
    for tensor in (tensor for layer in kept.layers for tensor in layer):
        assert len(tensor) == shared
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_likelihood_that_is_none():
    model = architectures.make("Llama")
    with torch.no_grad():
        prefill = Prefill(model)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ClearheadError, match="log-likelihood of an answer is NaN"):
        log_likelihoods(model, prefill, _questions(), batch_tokens=99, advanced=lambda _count: None)


def test_pairs_as_tokens():
    letters = Letters(60)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(ord(one) % 59 for one in text)

    rows = encode_pairs(letters, [("why?", " so"), ("why? ", "so")], None)
    assert rows == [Row((60, *ids("why?")), ids(" so"))] * 2  # the space goes with the answer
    # As in the harness, a model of 5 tokens reads the last 5 of all but the last.
    (cut,) = encode_pairs(letters, [("why?", " so")], 5)
    assert cut == Row(ids("hy?"), ids(" so"))
    (whole,) = encode_pairs(letters, [("why?", " so")], 7)
    assert whole == rows[0]
    (least,) = encode_pairs(letters, [("why?", " so")], 3)
    assert least == Row(ids("?"), ids(" so"))
    with pytest.raises(ClearheadError, match="3 tokens is longer than the 2 of the model"):
        encode_pairs(letters, [("why?", " so")], 2)
    with pytest.raises(ClearheadError, match="'' adds no token"):
        encode_pairs(letters, [("why?", "")], None)
