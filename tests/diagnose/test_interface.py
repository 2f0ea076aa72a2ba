"""A probed model is the plain model: same bits, same settings afterwards."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

from clearhead import ClearheadError
from clearhead.diagnose import attention_statistics, hidden_statistics
from clearhead.diagnose.interface import NAME

MODELS = ("transformer", "gpt2", "differential", "softmax1", "Llama", "GPT-2")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_equal(tiny, name, implementation):
    model = tiny.make(name)
    model.set_attn_implementation(implementation)
    ids = torch.stack(tiny.windows(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            plain = model(ids, **options).logits
            with attention_statistics(model) as statistics, hidden_statistics(model):
                probed = model(ids, **options).logits
            assert torch.equal(plain, probed)
            assert statistics.layers() == [0, 1, 2]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["differential", "Llama"])
def test_the_implementation_is_restored_after_an_error(tiny, name, implementation):
    model = tiny.make(name)
    model.set_attn_implementation(implementation)
    implementations = []

    def fail() -> None:
        implementations.append(model.config._attn_implementation)
        raise RuntimeError("in the body")

    with pytest.raises(RuntimeError, match="in the body"), attention_statistics(model):
        fail()
    assert implementations == [NAME]
    assert model.config._attn_implementation == implementation
    with pytest.raises(RuntimeError, match="in the body"), hidden_statistics(model):
        fail()
    assert not any(module._forward_hooks for module in model.modules())
    with attention_statistics(model):  # and another probe may enter
        pass


def test_autocast_outside_does_not_round_the_statistics(tiny):
    model = tiny.make("transformer")
    ids = torch.stack(tiny.windows(2))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(ids).logits
        with attention_statistics(model) as statistics:
            assert torch.equal(model(ids).logits, plain)
    floor = statistics.pooled("chance_floor", "softmax")
    assert floor == pytest.approx(tiny.harmonic(13), abs=1e-7)


def test_one_probe_at_a_time(tiny):
    model = tiny.make("Llama")
    with (
        attention_statistics(model),
        pytest.raises(ClearheadError, match="already being probed"),
        attention_statistics(tiny.make("GPT-2")),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_the_probe_by_itself_says_what_to_do(tiny):
    model = tiny.make("Llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ClearheadError, match="only inside"):
        model(tiny.windows(1)[0][None])


def test_models_that_cannot_be_observed():
    bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=11))
    original = bloom.config._attn_implementation
    with (
        pytest.raises(ClearheadError, match="does not use transformers' AttentionInterface"),
        attention_statistics(bloom),
    ):
        pass
    assert bloom.config._attn_implementation == original
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11)
    )
    with pytest.raises(ClearheadError, match="encoder-decoder"), attention_statistics(t5):
        pass
