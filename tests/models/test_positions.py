"""Positions in whole models: scaled ropes, ours and transformers', dynamic bases, shifts."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import with_rope_scaling
from clearhead.ops import ntk_theta

from . import space
from .space import WHOLE

SHAPE = WHOLE | {"max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _model(name: str = "transformer", **overrides: object) -> ClearheadForCausalLM:
    return ClearheadForCausalLM(preset(name, **SHAPE | overrides)).eval()


_ids = space.drawing(40, 61)


@pytest.mark.parametrize("name", ["transformer", "coca", "coca-slack", "differential"])
def test_scaling_shares_weights_and_leaves_the_model_as_it_was(name, tmp_path):
    model, ids = _model(name), _ids()
    before = model(ids).logits
    for kind in (*SCALINGS, "ntk"):
        scaled = with_rope_scaling(model, kind, **SCALINGS.get(kind, {"factor": 4}))
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
            steps = [
                model(one, past_key_values=cache).logits for one in ids[:, :length].split(1, 1)
            ]
            assert torch.allclose(steps[-1], whole[:, -1:], atol=1e-4)


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
    config = GPTNeoXConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    config.rope_parameters["partial_rotary_factor"] = 0.5
    other = with_rope_scaling(GPTNeoXForCausalLM(config), "ntk", factor=2.0)
    assert other.config.rope_parameters["rope_theta"] == pytest.approx(ntk_theta(1e4, 2.0, 4))


@pytest.mark.parametrize(
    ("make", "kind", "factor", "message"),
    [
        (_llama, "yran", 2, "did you mean yarn"),
        (_llama, "linear", 1, "factor is 1: a rope scaling takes one above 1"),
        (_llama, "ntk", None, "ntk takes factor"),
        (_llama, "dynamic-causal", 2, "did you mean dynamic"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "ntk", 2, "has none"),
        (lambda: _llama(rope_parameters=LINEAR), "ntk", 2, r"frequencies are 'linear' already"),
        (lambda: ClearheadForCausalLM(preset("alibi", **SHAPE)), "ntk", 2, "has none"),
        (lambda: ClearheadForCausalLM(preset("xpos", **SHAPE)), "linear", 2, "not defined for it"),
    ],
)
def test_refuses(make, kind, factor, message):
    with pytest.raises(ClearheadError, match=message):
        with_rope_scaling(make(), kind, **({} if factor is None else {"factor": factor}))
