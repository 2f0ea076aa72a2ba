"""Cached and uncached logits and greedy tokens agree for every attention; scaled positions."""

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import with_rope_scaling
from clearhead.ops import ntk_theta

from . import space
from .space import CAUSAL, WHOLE, caches, close

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


SHAPE = WHOLE | {"max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1}
SCALINGS = {kind: {"factor": 4.0} for kind in ("linear", "dynamic", "yarn", "ntk")}
SCALINGS["llama3"] = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _model(name: str = "transformer", **overrides: object) -> ClearheadForCausalLM:
    return ClearheadForCausalLM(preset(name, **SHAPE | overrides)).eval()


_ids = space.drawing(40, 61)


@pytest.mark.parametrize("name", ["transformer", "coca", "coca-slack", "differential"])
def test_scaling_shares_weights_and_leaves_the_model_as_it_was(name, tmp_path):
    model, ids = _model(name), _ids()
    before = model(ids).logits
    for kind, scaling in SCALINGS.items():
        scaled = with_rope_scaling(model, kind, **scaling)
        assert scaled.model.embed_tokens.weight is model.model.embed_tokens.weight
        assert scaled.lm_head.weight is scaled.model.embed_tokens.weight
        long = scaled(ids).logits
        assert (long - before)[:, -1].abs().max() > 1e-3, kind
        if kind == "dynamic":  # and nothing within the trained length
            short = ids[:, :16]
            assert torch.allclose(scaled(short).logits, model(short).logits, atol=1e-5)
        scaled.save_pretrained(tmp_path / kind)
        again = ClearheadForCausalLM.from_pretrained(tmp_path / kind).eval()
        assert torch.equal(again(ids).logits, long)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["transformer", "coca", "coca-slack"])
def test_a_dynamic_layer_is_exact_given_its_inputs(name):
    """With one layer nothing older than the base is in the cache: the last token is exact."""
    model, ids = _model(name, num_hidden_layers=1), _ids()
    model = with_rope_scaling(model, "dynamic", factor=4)
    with torch.no_grad():
        for length in (10, 17, 40):
            whole = model(ids[:, :length], use_cache=False).logits
            cache = DynamicCache()
            for token in ids[:, :length].split(1, 1):
                last = model(token, past_key_values=cache).logits
            assert torch.allclose(last, whole[:, -1:], atol=1e-4)


def test_no_call_changes_a_later_one_and_every_row_has_its_own_base():
    model = with_rope_scaling(_model(), "dynamic", factor=4)
    long, short = _ids(1, 60), _ids(1, 20)
    with torch.no_grad():
        before = model(short).logits
        model(long)
        assert torch.equal(model(short).logits, before)
        rows = torch.cat([long, torch.cat([_ids(1, 40), short], 1)])
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[1, :40] = 0
        together = model(rows, attention_mask=mask).logits
        assert torch.allclose(together[1, 40:], before[0], atol=1e-4)
        assert torch.allclose(together[0], model(long).logits[0], atol=1e-4)


@pytest.mark.parametrize(
    "name", ["transformer", "xpos", "alibi", "forget", "coca", "coca-strict", "coca-slack"]
)
def test_moving_all_positions_moves_logits_of_the_authors_coca_alone(name):
    model, ids = _model(name), _ids(length=12)
    at = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        here, there = (model(ids, position_ids=at + shift).logits for shift in (0, 37))
    change = (here - there).abs().max()
    assert change > 1e-2 if name == "coca-slack" else change < 1e-3


@pytest.mark.parametrize(("length", "cache"), [(64, "static"), (65_536, "dynamic")])
def test_xpos_in_float16_is_as_near_to_float32_at_every_length(length, cache):
    torch.manual_seed(0)
    model = _model("xpos", max_position_embeddings=length)
    ids = _ids()
    expected = model(ids).logits
    model.half()
    error = (model(ids).logits - expected).abs().max()
    assert error < 2e-2 * expected.abs().max()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    options = {"cache_implementation": cache, "disable_compile": True, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    out = model.generate(ids[:, :8], max_new_tokens=4, **options)
    whole = model(out.sequences[:, :-1]).logits[:, -1]
    torch.testing.assert_close(out.logits[-1], whole.float(), atol=2e-2, rtol=2e-2)


def _llama(**rope) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **rope)).eval()


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("dynamic", {"rope_type": "dynamic", "factor": 4.0}),
        ("ntk", {"rope_type": "default", "rope_theta": ntk_theta(10_000.0, 4.0, 8)}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    ],
)
def test_is_a_model_made_with_these_parameters(kind, parameters):
    model = _llama()
    other = with_rope_scaling(model, kind, factor=4.0)
    made = _llama(rope_parameters={"rope_theta": 10_000.0} | parameters)
    made.load_state_dict(model.state_dict())
    ids = torch.randint(0, 61, (2, 40))
    with torch.no_grad():
        plain = model(ids).logits
        torch.testing.assert_close(other(ids).logits, made(ids).logits)
        assert not torch.allclose(other(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)  # it stays as it is
    for mine, shared in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.data_ptr() == shared.data_ptr()


def test_only_the_rotated_part_of_a_head_counts_for_ntk():
    config = transformers.GPTNeoXConfig(
        **SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}
    )
    config.rope_parameters["partial_rotary_factor"] = 0.5
    other = with_rope_scaling(transformers.GPTNeoXForCausalLM(config), "ntk", factor=2.0)
    assert other.config.rope_parameters["rope_theta"] == pytest.approx(ntk_theta(1e4, 2.0, 4))


@pytest.mark.parametrize(
    ("make", "kind", "factor", "message"),
    [
        (_llama, "yran", 2, "did you mean yarn"),
        (_llama, "linear", 1, "factor is 1: a rope scaling takes one above 1"),
        (_llama, "ntk", None, "ntk takes factor"),
        (_llama, "dynamic-causal", 2, "did you mean dynamic"),
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)
            ),
            "ntk",
            2,
            "has none",
        ),
        (lambda: _llama(rope_parameters=LINEAR), "ntk", 2, r"frequencies are 'linear' already"),
        (lambda: ClearheadForCausalLM(preset("alibi", **SHAPE)), "ntk", 2, "has none"),
        (lambda: ClearheadForCausalLM(preset("xpos", **SHAPE)), "linear", 2, "not defined for it"),
    ],
)
def test_refuses(make, kind, factor, message):
    with pytest.raises(ClearheadError, match=message):
        with_rope_scaling(make(), kind, **({} if factor is None else {"factor": factor}))
