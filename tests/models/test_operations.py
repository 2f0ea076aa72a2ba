"""Operations of a step of decoding, counted: what a small model's step costs in eager mode."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead.experiments.prefixes import fill
from clearhead.models.conversion import converted
from clearhead.models.starts import started

SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 31,
    "max_position_embeddings": 32,
}
TURNED = {"mlp_rotation": "hadamard"}
PREFIX = {"normalizer": "key-value", "prefix_length": 1}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        makes = any("Tensor" in str(each.type) for each in function._schema.returns)
        self.number += makes and not function.is_view and "view" not in function._schema.name
        return function(*args, **(kwargs or {}))


def _models(layers: int) -> dict[str, Any]:
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE)).eval()
    plain = converted(llama)
    prefixed = started(plain, TURNED | PREFIX).model
    fill(prefixed, plain, torch.tensor([[0]]))
    turned = started(plain, TURNED).model
    return {"Llama": llama, "transformer": plain, "turned": turned, "prefixed": prefixed}


@torch.no_grad()
def _step(model: Any) -> int:
    ids = torch.randint(0, 31, (1, 6))
    cache = model(ids, use_cache=True).past_key_values
    with _Counting() as counting:
        model(ids[:, :1], past_key_values=cache)
    return counting.number


def test_a_layer_has_no_more_operations_than_llama_s_but_for_what_its_mechanisms_compute():
    """A rotation is two products; a prefix is two products, a row of scores and their sum."""
    two, three = ({name: _step(model) for name, model in _models(n).items()} for n in (2, 3))
    count = {name: three[name] - two[name] for name in two}
    assert count["transformer"] <= count["Llama"]
    assert count["turned"] <= count["transformer"] + 2
    assert count["prefixed"] <= count["turned"] + 6
    around = {name: two[name] - 2 * count[name] for name in two}
    assert around["prefixed"] <= around["turned"] + 1
