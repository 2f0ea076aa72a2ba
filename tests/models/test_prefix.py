"""Learned keys and values before every text: a token's own are that token before the text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
from clearhead.lab import prefixes
from clearhead.lab.prefixes import fill, largest_states
from clearhead.models.base_model import cache_of
from clearhead.models.caches import PrefixCache
from clearhead.models.inspection import longest_text
from clearhead.models.starts import started

from . import space

PREFIX = torch.tensor([[3, 7]])
CHANGES = {"normalizer": "key-value", "prefix_length": 2}


def _both(**keys: Any) -> tuple[ClearheadForCausalLM, ClearheadForCausalLM]:
    """A model, and the same with the prefix in it."""
    plain = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | keys)).double().eval()
    made = started(plain, CHANGES).model
    fill(made, plain, PREFIX)
    return plain, made


def _after(plain: ClearheadForCausalLM, ids: Tensor) -> Tensor:
    whole = torch.cat([PREFIX.expand(len(ids), -1), ids], 1)
    with torch.no_grad():
        return plain(whole, use_cache=False).logits[:, 2:]


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


# Others are in test_formulas.py, where the prefix is any numbers.
MODELS = {
    "rope": {},
    "a key for all": {"num_key_value_heads": 1},
    "alibi in a layer": {"layer_overrides": [{}, {"position": "alibi"}]},
    "learned": {"position": "learned"},
    "differential": {"maps": "differential"},
    "own values": {"values": "reparametrised", "head_dim": 4, "epilogue": "xsa"},
}


@torch.no_grad()
def test_a_dynamic_base_counts_the_prefix():
    """In one layer: those above have the prefix as it was read without the text."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plain, made = _both(rope_parameters=rope, max_position_embeddings=8, num_hidden_layers=1)
    ids = space.ids()
    assert _apart(made(ids, use_cache=False).logits, _after(plain, ids)) < 1e-12


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_plain_model_after_the_prefix(keys):
    """At once, in steps, and padded on the left; in float64."""
    plain, made = _both(**keys)
    ids = space.ids()
    wanted = _after(plain, ids)
    bound = 1e-6 if "maps" in keys else 1e-12  # λ is float32
    assert _apart(made(ids, use_cache=False).logits, wanted) < bound
    cache = PrefixCache()
    steps = [made(part, past_key_values=cache).logits for part in ids.split([5, 3, 1, 2], 1)]
    assert _apart(torch.cat(steps, 1), wanted) < bound
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    uneven = torch.tensor([[0] * 3 + [1] * 11, [1] * 14])
    found = made(padded, attention_mask=uneven).logits
    assert _apart(found[:1, 3:], wanted[:1]) < bound
    assert _apart(found[1:], _after(plain, padded[1:])) < bound


def test_generation_goes_on_as_after_the_prefix():
    plain, made = _both()
    ids = space.ids(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    found = made.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    assert isinstance(cache_of(found), PrefixCache)
    whole = torch.cat([PREFIX, ids], 1)
    wanted = plain.generate(whole, attention_mask=torch.ones_like(whole), **options)
    assert torch.equal(found.sequences, wanted[:, 2:])
    static = GenerationConfig(cache_implementation="static", **options)
    assert torch.equal(made.generate(ids, static, attention_mask=mask), wanted[:, 2:])
    made.generation_config.cache_implementation = "static"
    assert torch.equal(made.generate(ids, attention_mask=mask, **options), wanted[:, 2:])


def test_it_takes_positions_that_a_model_can_tell_apart_and_as_many_tokens_as_it_has_places():
    plain, made = _both(position="learned")
    before = made.model.layers[0].self_attn.normalizer.key_bias.clone()
    with pytest.raises(ClearheadError, match="1 tokens for prefix_length=2: give --length 2"):
        fill(made, plain, PREFIX[:, :1])
    assert torch.equal(made.model.layers[0].self_attn.normalizer.key_bias, before)
    assert longest_text(made) == 22
    with pytest.raises(ClearheadError, match="25 tokens are more than the 24 positions"):
        made(space.ids(1, 23))
    with pytest.raises(ClearheadError, match="position_ids has 22, outside"):
        made(space.ids(1, 3), position_ids=torch.tensor([[20, 21, 22]]))


@pytest.mark.parametrize("kind", [DynamicCache, PrefixCache])
@torch.no_grad()
def test_a_cache_of_either_kind_goes_on_until_it_is_filled_anew(kind):
    plain, made = _both()
    ids = space.ids(1)
    wanted = _after(plain, ids)
    cache = kind(config=made.config)
    made(ids[:, :5], past_key_values=cache)
    assert cache.get_seq_length() == 5  # the text's length alone
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    steps = [
        made(part.expand(3, -1), past_key_values=cache).logits for part in ids[:, 5:].split(1, 1)
    ]
    assert _apart(torch.cat(steps, 1), wanted[:, 5:].expand(3, -1, -1)) < 1e-12
    cache.crop(-4)
    found = made(ids[:, 7:].expand(3, -1), past_key_values=cache).logits
    assert _apart(found[:1], wanted[:, 7:]) < 1e-12
    for layer in made.model.layers:  # other weights: a text that begins anew has their keys
        layer.self_attn.normalizer.key_bias.neg_()
    other = made(ids, use_cache=False).logits
    assert _apart(other, wanted) > 1e-3
    cache.reset()
    if cache.get_seq_length():  # transformers 5.17 keeps the slots
        cache = kind(config=made.config)
    steps = [made(part, past_key_values=cache).logits for part in ids.split([5, 1, 5], 1)]
    assert _apart(torch.cat(steps, 1), other) < 1e-12


@pytest.mark.parametrize("kind", [DynamicCache, PrefixCache])
def test_a_cache_filled_without_gradients_hides_none_of_the_prefix(kind):
    _, made = _both()
    ids = space.ids(1)
    biases = [p for name, p in made.named_parameters() if name.endswith("_bias")]
    found = []
    for implementation in ("sdpa", "eager"):
        made.set_attn_implementation(implementation)
        cache = kind(config=made.config)
        with torch.no_grad():
            made(ids[:, :5], past_key_values=cache)
            made(ids[:, 5:6], past_key_values=cache)
        total = made(ids[:, 6:7], past_key_values=cache).logits.square().sum()
        found.append(torch.autograd.grad(total, biases))
    for fast, exact in zip(*found, strict=True):
        assert (fast - exact).abs().max() < 1e-10 * exact.abs().max()
        assert exact.abs().max() > 0


class _Tokenizer:
    bos_token_id = eos_token_id = None

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return SimpleNamespace(input_ids=[9])  # the newline

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_the_search_takes_what_fails_least_at_no_loss(monkeypatch):
    """On four pieces, whose usual largest state is 100: 10 and less is small."""
    states = {
        (): [100, 90, 100, 110],
        (9,): [100, 1, 1, 1],  # fails on one
        (1,): [1, 1, 1, 50],
        (2,): [5, 5, 5, 5],
        (3,): [4, 4, 4, 4],  # smaller states, at a loss
        (2, 1): [3, 3, 3, 3],  # no loss against none, and one against (2,)
        (2, 3): [4.9, 4.9, 4.9, 4.9],  # hardly lower
    }
    perplexities = {(): 10.0, (3,): 10.2, (2,): 9.0, (2, 1): 9.2}
    monkeypatch.setattr(
        prefixes, "largest_states", lambda model, pieces, ids: states.get(tuple(ids), [120.0] * 4)
    )
    monkeypatch.setattr(
        prefixes,
        "perplexity",
        lambda model, windows, prefix, **_: SimpleNamespace(perplexity=perplexities[prefix]),
    )
    model: Any = None
    text = [torch.tensor([1, 2, 3] * 6)]
    found = prefixes.searched_prefix(model, _Tokenizer(), text)
    assert found.ids == (2,)
    tried = {tuple(one["tokens"]): one for one in found.tried}
    assert [tried[ids]["fails"] for ids in ((), (9,), (1,), (2,))] == [4, 1, 1, 0]
    asked = {ids for ids, one in tried.items() if one["perplexity"] is not None}
    assert asked == perplexities.keys()
    perplexities |= {(2,): 10.2, (1,): 10.0, (9,): 10.0}
    # The best then fails on one piece, with a smaller state than the newline.
    assert prefixes.searched_prefix(model, _Tokenizer(), text).ids == (1,)


def test_the_largest_state_is_the_text_s_and_not_the_prefix_s():
    plain, _ = _both()
    with torch.no_grad():
        plain.model.embed_tokens.weight[9] *= 1000
    pieces = [torch.randint(0, 9, (5,)) for _ in range(20)]  # more than a batch
    for ids in ((), (9,), (3, 9)):
        found = largest_states(plain, pieces, ids)
        assert len(found) == len(pieces)
        for one, piece in zip(found, pieces, strict=True):
            whole = torch.cat([torch.tensor(ids, dtype=torch.long), piece])[None]
            with torch.no_grad():
                states = plain.model(whole, output_hidden_states=True).hidden_states
            text = torch.stack([x[0, len(ids) :].abs().max() for x in states])
            assert one == pytest.approx(float(text.max()), rel=1e-9)
            if ids:
                assert one < 0.1 * float(states[0].abs().max())
