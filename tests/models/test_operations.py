"""A step of decoding: its operations, counted, and as a CUDA graph would hold it, without a GPU.

On a GPU each operation is a kernel, and a step of one text takes as long as their launches.
"""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

from . import space
from .space import CAUSAL, build

SHAPE: dict[str, Any] = space.SHAPE | {"hidden_size": 128, "num_key_value_heads": 4}
SHAPE |= {"head_dim": 32, "num_hidden_layers": 2}
# Of Llama's operations in a layer.
BOUND = 1.15
# Gates, summed over the keys; magnitudes and a phase of all keys; no kernel of its own.
WIDER = {"forget": 1.7, "pope": 1.35, "softpick": 1.6}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        makes = any("Tensor" in str(each.type) for each in function._schema.returns)
        self.number += makes and not function.is_view and "view" not in function._schema.name
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def _step(model: Any) -> int:
    model, ids = model.eval(), torch.randint(0, 31, (1, 6))
    cache = model(ids, use_cache=True).past_key_values
    with _Counting() as counting:
        model(ids[:, :1], past_key_values=cache)
    return counting.number


@pytest.mark.parametrize("name", CAUSAL)
def test_a_presets_layer_takes_few_more_operations_than_llama_s(name):
    counts = {}
    for layers in (3, 4):  # the first layer may differ
        shape = SHAPE | {"num_hidden_layers": layers}
        config, ours = LlamaConfig(**shape), ClearheadForCausalLM(preset(name, **shape))
        counts[layers] = _step(LlamaForCausalLM(config)), _step(ours)
    peer, own = (after - before for before, after in zip(counts[3], counts[4], strict=True))
    print(f"{name}: {own} of {peer}")
    assert own / peer <= WIDER.get(name, BOUND)


CHANGES = {
    "in place": torch.no_grad()(lambda weight: weight.add_(0.5)),
    "assigned": lambda weight: setattr(weight, "data", weight.data + 0.5),
    # By PyTorch's counter of versions: the next text's first tokens tell.
    "unseen": lambda weight: weight.data.add_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_has_the_lambda_and_the_gain_of_the_weights(change):
    model = ClearheadForCausalLM(preset("differential", **SHAPE))
    ids, modes = torch.randint(0, 31, (1, 6)), (torch.no_grad, torch.inference_mode)
    for mode in (*modes, *modes):
        with mode():
            cache = model.eval()(ids[:, :5], use_cache=True).past_key_values
            got = model(ids[:, 5:], past_key_values=cache).logits
        want = model(ids, use_cache=False).logits[:, 5:]
        assert torch.allclose(got, want, atol=1e-5)
        maps = model.model.layers[1].self_attn.maps
        for weight in (maps.lambda_q1, maps.lambda_k1, maps.norm_weight):
            CHANGES[change](weight)


PLACES, ROOM = 12, 16  # tokens, and slots of a static cache


def _text() -> torch.Tensor:
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
    """Over a static cache, traced with tensors that have no values: whatever reads one, or makes a
    shape of one, is an error."""
    model, ids = build(name, **keys), _text()
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


def test_the_room_of_a_cache_may_be_more_than_the_positions_but_not_its_tokens():
    model, ids = build("gpt2", max_position_embeddings=PLACES), _text()
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :11], past_key_values=cache)
    model(ids[:, 11:], past_key_values=cache)
    with pytest.raises(ClearheadError, match="13 tokens are more than the 12 positions"):
        model(ids[:, :1], past_key_values=cache)
