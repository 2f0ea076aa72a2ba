"""Operations of a step of decoding, counted: what a small model's step costs in eager mode.

On a GPU each is a kernel, and a step of one text takes as long as their launches.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadForCausalLM, preset
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

from . import space
from .space import CAUSAL

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


def _in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(0.5)


def _assigned(weight: torch.Tensor) -> None:
    weight.data = weight.data + 0.5


def _unseen(weight: torch.Tensor) -> None:
    """By PyTorch's counter of versions: the next text's first tokens tell."""
    weight.data.add_(0.5)


@pytest.mark.parametrize("change", [_in_place, _assigned, _unseen])
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
            change(weight)
        if change is not _unseen:
            with torch.no_grad():
                kept = maps.lambdas(torch.zeros(1, 1, 1))
                assert torch.equal(kept, maps._lambda())
            assert kept > 0.2
