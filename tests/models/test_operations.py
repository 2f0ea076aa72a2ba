"""Operations of a step of decoding, counted: what a small model's step costs in eager mode.

On a GPU each is a kernel, and a step of one text takes as long as their launches.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadForCausalLM, preset
from clearhead.experiments.prefixes import fill
from clearhead.models import PRESETS
from clearhead.models.conversion import converted
from clearhead.models.starts import started
from clearhead.ops import dispatch, split_decode
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

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
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}  # 32 wide
HOPPER = {"device": "cuda", "capability": (9, 0), "ordinal": 0}
CAUSAL = [name for name, keys in PRESETS.items() if keys.get("direction") != "bidirectional"]
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


def _models(layers: int) -> dict[str, Any]:
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE)).eval()
    plain = converted(llama)
    prefixed = started(plain, TURNED | PREFIX).model
    fill(prefixed, plain, torch.tensor([[0]]))
    turned = started(plain, TURNED).model
    return {"Llama": llama, "transformer": plain, "turned": turned, "prefixed": prefixed}


@torch.no_grad()
def _step(model: Any, dtype: torch.dtype = torch.float32) -> int:
    model = model.to(dtype).eval()
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


def _of_llama(name: str, dtype: torch.dtype) -> float:
    """A layer's operations, of those of Llama's layer."""
    shape, counts = SHAPE | HEADS, {}
    for layers in (3, 4):  # the first layer may differ
        config = LlamaConfig(num_hidden_layers=layers, **shape)
        ours = ClearheadForCausalLM(preset(name, **shape, num_hidden_layers=layers))
        counts[layers] = _step(LlamaForCausalLM(config), dtype), _step(ours, dtype)
    peer, own = (after - before for before, after in zip(counts[3], counts[4], strict=True))
    print(f"{name}: {own} of {peer}")
    return own / peer


@pytest.mark.parametrize("name", CAUSAL)
def test_a_presets_layer_takes_few_more_operations_than_llama_s(name):
    assert _of_llama(name, torch.float32) <= WIDER.get(name, BOUND)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_by_the_kernels_of_a_gpu_in_bfloat16(name, monkeypatch):
    """PyTorch's RMS norm is one kernel there, `split-decode` two."""
    monkeypatch.setattr(dispatch, "_chosen", _on_hopper)
    monkeypatch.setattr(torch, "rms_norm", lambda x, *_: x.clone())

    def decode(q: Any, k: Any, v: Any, lam: Any, *_: Any) -> Any:
        o, lse = split_decode._outputs(q, v, 1 if lam is None else 2)
        return o, lse

    monkeypatch.setattr(split_decode, "_decode", decode)
    assert _of_llama(name, torch.bfloat16) <= WIDER.get(name, BOUND)


def _on_hopper(names: str, *arguments: Any) -> str:
    return dispatch.resolve(dispatch.request(*arguments)._replace(**HOPPER)).name


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
    model = ClearheadForCausalLM(preset("differential", **SHAPE | HEADS, num_hidden_layers=2))
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
