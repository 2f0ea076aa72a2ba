"""transformers' continuous batching against generate, request by request."""

import inspect

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
from clearhead.models.serving import served

from .space import WHOLE as SHAPE

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7], list(range(20, 37))]
TOKENS = 6


def _model(name: str, **keys: object) -> ClearheadForCausalLM:
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **SHAPE | keys)).eval()


def _batched(model) -> list[list[int]]:
    """Fewer tokens a batch than the prompts have, so that one is read in parts."""
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    how = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16, **{page: 4})
    model.generation_config.update(pad_token_id=0, eos_token_id=60, do_sample=False)
    out = model.generate_batch(PROMPTS, continuous_batching_config=how, max_new_tokens=TOKENS)
    assert all(each.error is None for each in out.values())
    found = {tuple(each.prompt_ids): each.generated_tokens for each in out.values()}
    return [found[tuple(prompt)] for prompt in PROMPTS]


def _generated(model) -> list[list[int]]:
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in rows]


# Presets that docs/serving.md calls batched as they are, and in the form for servers.
BATCHED = {
    *("transformer", "softmax1", "sink", "key-bias", "key-value", "xpos", "gpt2"),
    *("differential-v2", "coca", "coca-strict", "coca-slack", "gated", "xsa", "parallel"),
}
IN_THE_FORM = {"skipless", "sas", "sas-p", "sas-p-nonorm", "clearhead"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in sorted(BATCHED)),
        ("transformer", {"num_key_value_heads": 2}),
        ("transformer", {"sliding_window": 5}),
        ("sink", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_a_batch_of_requests_gets_what_each_gets_alone(name, keys):
    model = _model(name, **keys)
    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        with pytest.raises(ClearheadError, match="needs a transformers newer than"):
            _batched(model)
        return
    assert _batched(model) == _generated(model)


@pytest.mark.parametrize("name", sorted(IN_THE_FORM))
def test_shaped_blocks_are_batched_in_the_form_for_servers(name):
    model = _model(name, query_range=0.3)
    assert _batched(served(model)) == _generated(model)


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("differential", {}, "values twice as wide as its keys"),
        ("sas", {}, "takes the mean of all values"),
        ("alibi", {}, "makes keys wider than values"),
        ("forget", {}, "makes keys wider than values"),
        (
            "transformer",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "turns cached keys again",
        ),
    ],
)
def test_what_a_paged_cache_cannot_hold_is_refused_before_any_thread_starts(name, keys, reason):
    with pytest.raises(ClearheadError, match=reason):
        _model(name, **keys).generate_batch(PROMPTS, max_new_tokens=TOKENS)


def test_eager_attention_is_not_batched():
    model = _model("transformer")
    model.set_attn_implementation("eager")
    with pytest.raises(ClearheadError, match="needs attn_implementation='sdpa'"):
        model.generate_batch(PROMPTS, max_new_tokens=TOKENS)
