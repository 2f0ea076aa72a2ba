"""Cached and uncached logits agree for every attention there is, and greedy tokens are the same."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from clearhead import ClearheadError, ClearheadForCausalLM, preset

from . import space
from .space import CAUSAL, caches, close

PLACES = space.attentions()
SCALED = {"rope_theta": 1e4, "factor": 2.0}
# Every causal preset, and RoPE whose base changes with the length.
KINDS = {
    **{name: (name, {}) for name in CAUSAL},
    "dynamic": ("coca", {"rope_parameters": SCALED | {"rope_type": "dynamic"}}),
}


def _kind(name: str) -> ClearheadForCausalLM:
    base, own = KINDS[name]
    return space.displaced(preset(base, **space.SHAPE | {"head_dim": 4} | own))


def _models(scores: str, position: str) -> list[ClearheadForCausalLM]:
    """A quarter of a place's points: its neighbours have the others."""
    found = PLACES[scores, position][[*PLACES].index((scores, position)) % 4 :: 4]
    models = [ClearheadForCausalLM(space.config(**point)).eval() for point in found]
    # Softpick divides by scores near 0, which multiplies the rounding of float32.
    return [m.double() if m.config.normalizer == "softpick" else m for m in models]


@pytest.mark.parametrize(("scores", "position"), PLACES)
def test_every_attention_decodes_as_the_full_forward(scores, position):
    """And a batch is generated with either cache as each of its rows without."""
    long, short = space.ids(1, 9), space.ids(1, 5)
    rows = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1)])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for number, model in enumerate(_models(scores, position)):
        space.decodes(model)
        if number:
            continue
        want = []
        for row in (long, short):
            seen = torch.ones_like(row)
            alone = model.generate(row, attention_mask=seen, use_cache=False, **options)
            want.append(alone[0, -4:].tolist())
        for kind in ("dynamic", "static"):
            got = model.generate(rows, attention_mask=mask, cache_implementation=kind, **options)
            assert got[:, 9:].tolist() == want


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_padded_turns_are_the_full_forward_and_each_row_alone(name):
    """Each turn of a chat has rows of unequal length, padded on either side, one of nothing but
    padding. Positions are counted from the mask, so that a gap between turns is none."""
    model = _kind(name)
    rows, mask = space.ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :2] = mask[1, 5:8] = mask[2, 5:9] = mask[2, 9:] = mask[0, 4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)  # as `generate` gives them
    alone = [row[mask[i] == 1][None] for i, row in enumerate(rows)]
    want = [model(row, use_cache=False).logits[0] for row in alone]
    whole = model(rows, attention_mask=mask, use_cache=False).logits
    for given in (False, True):
        for cache in caches(model):
            steps = []
            for start, stop in ((0, 5), (5, 9), (9, 11), (11, 12)):
                inputs = {"position_ids": positions[:, start:stop]} if given else {}
                inputs |= {"attention_mask": mask[:, :stop], "past_key_values": cache}
                steps.append(model(rows[:, start:stop], **inputs).logits)
            for row, seen in enumerate(mask == 1):
                close(torch.cat(steps, 1)[row, seen], want[row])
                close(whole[row, seen], want[row])


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_positions_given_with_gaps_are_those_of_cached_keys(name):
    """From a later one on, within a call and between two, by rows; also after a crop."""
    model, ids = _kind(name), space.ids()
    places = torch.tensor([[2, 3, 4, 8, 9, 13, 14, 15, 16, 19, 20], [*range(3, 14)]])
    want = model(ids, position_ids=places, use_cache=False).logits
    cache, steps = DynamicCache(), []
    model(ids[:, :3], position_ids=places[:, :3], past_key_values=cache)
    cache.crop(-2)
    for start, stop in ((1, 5), (5, 9), (9, 10), (10, 11)):
        part, at = ids[:, start:stop], places[:, start:stop]
        steps.append(model(part, position_ids=at, past_key_values=cache).logits)
    close(torch.cat(steps, 1), want[:, 1:])


@torch.no_grad()
def test_rows_of_a_cache_whose_positions_have_gaps_may_be_repeated():
    model, ids = _kind("alibi"), space.ids()
    places = torch.tensor([[0, 1, 2, 6, 7, 8, 9, 10, 14, 15, 16]])
    want = model(ids, position_ids=places, use_cache=False).logits
    cache = DynamicCache()
    model(ids[:1, :5], position_ids=places[:, :5], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    got = model(ids[:1, 5:].expand(2, -1), position_ids=places[:, 5:], past_key_values=cache).logits
    close(got[0], want[0, 5:])
    close(got[1], want[0, 5:])
    cache, uneven = DynamicCache(), places[0, :10].view(2, 5)
    model(ids[:, :5], position_ids=uneven, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    with pytest.raises(ClearheadError, match="the cache has 2 rows, and the batch 4"):
        model(ids[:1].expand(4, -1), past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_another_model_is_refused(kind):
    model = ClearheadForCausalLM(preset("transformer", **space.SHAPE)).eval()
    for other in (
        *({"num_key_value_heads": 4}, {"head_dim": 4}, {"scores": "coca"}),
        *({"num_hidden_layers": 1}, {"num_hidden_layers": 3}),
    ):
        theirs = ClearheadForCausalLM(space.config(**other)).eval()
        cache = DynamicCache() if kind == "dynamic" else caches(theirs)[1]
        theirs(space.ids(), past_key_values=cache)
        with pytest.raises(ClearheadError, match=r"not of the 2 layers|start a new") as error:
            model(space.ids(length=1), past_key_values=cache)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("window", [4, None])
def test_a_cache_that_an_interrupted_step_left_is_refused(window):
    model = ClearheadForCausalLM(space.config(num_hidden_layers=2, sliding_window=window)).eval()
    cache = DynamicCache(config=model.config)
    model(space.ids(length=8), past_key_values=cache)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(space.ids(length=1), past_key_values=cache)
    hook.remove()
    with pytest.raises(ClearheadError, match="a step was interrupted"):
        model(space.ids(length=1), past_key_values=cache)


def test_a_full_static_cache_is_refused():
    model = ClearheadForCausalLM(preset("transformer", **space.SHAPE)).eval()
    cache = StaticCache(config=model.config, max_cache_len=8)
    model(space.ids(length=8), past_key_values=cache)
    with pytest.raises(ClearheadError, match="no room for 9 tokens"):
        model(space.ids(length=1), past_key_values=cache)


@pytest.mark.parametrize(
    "name", ["transformer", "differential", "differential-v2", "coca", "alibi", "forget"]
)
def test_beams_sampling_and_assisted_decoding(name):
    """Beams reorder the cache, an assistant's rejected tokens are cropped from it."""
    model = ClearheadForCausalLM(preset(name, **space.SHAPE)).eval()
    ids = space.ids(1, 6)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    for search in ({"do_sample": False, "num_beams": 3}, {"do_sample": True, "temperature": 0.7}):
        found = []
        for cached in (True, False):
            torch.manual_seed(1)
            found.append(model.generate(ids, use_cache=cached, **search, **options).tolist())
        assert found[0] == found[1]
    greedy = model.generate(ids, do_sample=False, **options)
    other = ClearheadForCausalLM(preset(name, **space.SHAPE | {"num_hidden_layers": 1})).eval()
    assisted = model.generate(ids, do_sample=False, assistant_model=other, **options)
    assert assisted.tolist() == greedy.tolist()
