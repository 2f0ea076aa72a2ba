"""A step of decoding over a static cache as a CUDA graph would hold it, without a GPU.

The step is traced once, uncompiled, with tensors that have no values: whatever reads one, or makes
a shape of one, is an error. The same calls then run at every later length.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import StaticCache

from benchmarks import dispatch_table
from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.ops import dispatch

from .space import CAUSAL, WHOLE

PLACES, ROOM = 12, 16


def _model(name: str, **keys: object) -> ClearheadForCausalLM:
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **WHOLE | keys)).eval()


def _ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, PLACES), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "keys", "padding"),
    [
        *((name, {}, 3) for name in CAUSAL),
        *((name, {}, 0) for name in ("transformer", "differential", "coca", "forget", "sas")),
        ("transformer", {"num_key_value_heads": 2, "normalizer": "key-value"}, 0),
        ("transformer", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 3),
    ],
)
@torch.no_grad()
def test_a_step_traced_once_serves_every_later_length(name, keys, padding):
    model, ids = _model(name, **keys), _ids()
    mask = torch.ones(2, ROOM, dtype=torch.long)  # of all the cache's room, from the first token on
    mask[1, :padding] = 0
    whole = model(ids, attention_mask=mask[:, :PLACES], use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :5], attention_mask=mask, past_key_values=cache)
    names = "cumulative_length", "keys", "values"
    state = [tuple(getattr(layer, each) for each in names) for layer in cache.layers]
    given = mask if padding else None

    def step(token: torch.Tensor, mask: torch.Tensor | None, state: list) -> torch.Tensor:
        for layer, tensors in zip(cache.layers, state, strict=True):
            for each, tensor in zip(names, tensors, strict=True):
                setattr(layer, each, tensor)
        return model(token, attention_mask=mask, past_key_values=cache).logits[:, 0]

    trace = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = trace(ids[:, 5:6], given, state)
    for place in range(5, PLACES):
        got = graph(ids[:, place : place + 1], given, state)
        assert torch.allclose(got, whole[:, place], atol=1e-4)
    assert all(length == PLACES for length, *_ in state)


@pytest.mark.parametrize("depth", [16, 64, 72, 128, 320])
def test_on_a_gpu_a_lone_query_of_masked_slots_goes_to_a_kernel_that_reads_no_mask(depth):
    """Packing would: it counts the tokens on the host."""
    lone = dispatch_table.PLAIN._replace(
        device="cuda", depth=depth, width=depth, **dispatch_table.LONE
    )
    halves = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
    for changes in (*halves, {}, {"width": 2 * depth}, {"sink": True}):
        asked = lone._replace(key_mask=True, capability=(9, 0), **changes)
        assert dispatch.resolve(asked).name in ("sdpa", "split-decode", "products")


def test_the_room_of_a_cache_may_be_more_than_the_positions_but_not_its_tokens():
    model, ids = _model("gpt2", max_position_embeddings=PLACES), _ids()
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :11], past_key_values=cache)
    model(ids[:, 11:], past_key_values=cache)
    with pytest.raises(ClearheadError, match="13 tokens are more than the 12 positions"):
        model(ids[:, :1], past_key_values=cache)
