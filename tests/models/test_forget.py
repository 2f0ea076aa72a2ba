"""Forget gates in whole models: the layer from its formula, ALiBi as a special case, caches."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadForCausalLM, ops, preset
from clearhead.ops import oracles

from . import space


def _model(**keys: object) -> ClearheadForCausalLM:
    """With gates far apart, as after training."""
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | {"position": "forget"} | keys))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate_proj.bias"):
                p.normal_(1, 2)
    return model.eval()


def _ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 31, (batch, length))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_layer_and_all_its_gradients_are_the_formula_s(groups):
    """Heads that share a key have a gate each."""
    model, ids = _model(num_key_value_heads=groups).double(), _ids()
    attention = model.model.layers[1].self_attn
    seen: dict[str, Tensor] = {}
    attention.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    model(ids, use_cache=False)
    x, names = seen["x"], [name for name, _ in attention.named_parameters()]
    assert "decay.gate_proj.weight" in names

    q, k, v = (
        projection(x).unflatten(-1, (heads, 8)).transpose(1, 2)
        for projection, heads in (
            *((attention.q_proj, 4), (attention.k_proj, groups)),
            (attention.v_proj, groups),
        )
    )
    k, v = (each.repeat_interleave(4 // groups, 1) for each in (k, v))
    gate = attention.decay.gate_proj
    log_gates = torch.sigmoid(x @ gate.weight.T + gate.bias).log().transpose(1, 2)
    scores = q @ k.mT * 8**-0.5 + oracles.forget_bias(log_gates, 11)
    scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    want = attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(seen["out"], want, atol=1e-12)
    inputs, grad = (x, *attention.parameters()), torch.randn_like(want)
    found, expected = (
        torch.autograd.grad(out, inputs, grad, retain_graph=True) for out in (seen["out"], want)
    )
    for got, wanted in zip(found, expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-11)


@pytest.mark.parametrize("maps", ["single", "differential", "differential-v2"])
def test_gates_of_one_value_for_all_tokens_are_alibi(maps):
    """f = exp(−slope): the same scores, also of maps that share a head's slope."""
    alibi = ClearheadForCausalLM(space.config(position="alibi", maps=maps)).eval()
    forget, ids = _model(maps=maps), _ids()
    forget.load_state_dict(alibi.state_dict(), strict=False)
    with torch.no_grad():
        for layer in forget.model.layers:
            gate = layer.self_attn.decay.gate_proj
            gate.weight.zero_()
            gate.bias.copy_(-torch.expm1(ops.alibi_slopes(len(gate.bias))).log())
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        got, want = (
            model(ids, attention_mask=mask, use_cache=False).logits for model in (forget, alibi)
        )
    assert torch.allclose(got[0], want[0], atol=1e-4)
    assert torch.allclose(got[1, 3:], want[1, 3:], atol=1e-4)


@torch.no_grad()
def test_documents_in_one_row_are_those_read_alone():
    model, ids = _model(), _ids(1)
    documents = torch.tensor([[0] * 4 + [1] * 7])
    got = model(ids, document_ids=documents).logits
    want = [model(part, use_cache=False).logits for part in ids.split([4, 7], 1)]
    assert torch.allclose(got, torch.cat(want, 1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_cached_decoding_in_half_precision_has_the_gates_of_the_full_forward(dtype):
    """No nearer than a rounding of the output, over sums of gates that no half number holds."""
    model, ids = _model(num_hidden_layers=1).to(dtype), _ids(length=24)
    whole, cache = model(ids, use_cache=False).logits, DynamicCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=0.02 * float(whole.abs().max()))


def test_a_cache_holds_one_number_a_head_beside_the_keys():
    model, cache = _model(), DynamicCache()
    model(_ids(), past_key_values=cache)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert (keys.shape[-1], values.shape[-1]) == (8 + 2, 8)  # two heads a key


def test_gates_start_at_one_half():
    """As in the authors' code: no bias, weights as any matrix."""
    model = ClearheadForCausalLM(preset("forget", initializer_range=0.02, **_without_range()))
    for layer in model.model.layers:
        gate = layer.self_attn.decay.gate_proj
        assert not gate.bias.any()
        assert float(gate.weight.detach().std()) == pytest.approx(0.02, rel=0.3)


def _without_range() -> dict[str, object]:
    return {key: value for key, value in space.WHOLE.items() if key != "initializer_range"}
