"""Gates after the maps and in the scores, exclusive self-attention, a learned key, and what these,
PoPE and softpick meet."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadForCausalLM, ops, preset
from clearhead.nn.outputs import without_own
from tests.ops import oracles
from tests.ops.agreement import agree

from . import space

MAPS = {
    "single": {},
    "differential": {"maps": "differential"},
    "differential-v2": {"maps": "differential-v2"},
    "a key for all": {"num_key_value_heads": 1},
}
MEETINGS = [
    {"epilogue": "gate"},
    {"epilogue": "gate", "maps": "differential"},
    {"epilogue": "xsa"},
    {"epilogue": "gate", "maps": "differential", "normalizer": "key"},
    {"epilogue": "gate", "shaping": "shaped", "query_range": 0.3, "normalizer": "key"},
    {"epilogue": "gate", "scores": "coca", "maps": "differential-v2"},
    {"epilogue": "xsa", "maps": "differential", "position": "alibi", "normalizer": "softmax1"},
    {"epilogue": "xsa", "maps": "differential-v2", "normalizer": "key", "sliding_window": 3},
    {"epilogue": "xsa", "order": "parallel", "values": "identity", "head_dim": 4},
    {"normalizer": "key-value", "maps": "differential"},
    {"scores": "pope", "maps": "differential"},
    {"scores": "pope", "maps": "differential-v2", "normalizer": "softpick"},
    {"normalizer": "softpick", "maps": "differential"},
]


def _model(**keys: object) -> ClearheadForCausalLM:
    """With key biases that are not 0, as after training."""
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | keys)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".normalizer." in name:
                p.normal_()
    return model


_ids = space.ids


def _seen(model: ClearheadForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """What the second layer's attention reads, and what its output projection reads."""
    seen: dict[str, Tensor] = {}
    attention = model.model.layers[1].self_attn
    attention.register_forward_hook(lambda m, args, out: seen.update(x=args[0]))
    attention.o_proj.register_forward_pre_hook(lambda m, args: seen.update(heads=args[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    return {name: value.double() for name, value in seen.items()}


def _both(epilogue: str, **keys: object) -> tuple[ClearheadForCausalLM, dict, dict]:
    """A model with the epilogue, and the same without it in the second layer."""
    model, ids = _model(epilogue=epilogue, **keys), _ids()
    plain = _model(epilogue=epilogue, layer_overrides=[{}, {"epilogue": "none"}], **keys)
    plain.load_state_dict(model.state_dict(), strict=False)
    return model, _seen(model, ids), _seen(plain, ids)


@pytest.mark.parametrize("name", MAPS)
def test_a_gate_is_a_sigmoid_of_the_input(name):
    model, with_gate, without = _both("gate", **MAPS[name])
    weight = model.model.layers[1].self_attn.epilogue.gate_proj.weight.double()
    assert torch.equal(with_gate["x"], without["x"])
    gates = 1 / (1 + torch.exp(-(with_gate["x"] @ weight.T)))
    assert torch.allclose(with_gate["heads"], without["heads"] * gates, atol=1e-6)


@pytest.mark.parametrize("name", MAPS)
def test_a_head_loses_what_lies_along_its_own_value(name):
    """Token by token and head by head, from the formula."""
    model, got, without = _both("xsa", **MAPS[name])
    values = got["x"] @ model.model.layers[1].self_attn.v_proj.weight.double().T
    groups = model.config.num_key_value_heads
    heads, own = (2, 2) if name == "differential" else (4, 1)
    v = values.unflatten(-1, (groups // own, -1)).repeat_interleave(heads * own // groups, 2)
    o, unit = without["heads"].unflatten(-1, (heads, -1)), v / v.norm(dim=-1, keepdim=True)
    want = o - (o * unit).sum(-1, keepdim=True) * unit
    assert torch.allclose(got["heads"], want.flatten(2), atol=1e-5)
    assert got["heads"][:, 0].abs().max() < 1e-5  # its own value is all that it sees
    assert got["heads"][:, 1].abs().max() > 1e-2


def test_a_value_of_nothing_takes_nothing_away():
    o, v = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    assert torch.equal(without_own(o, v), o)
    for gradient in torch.autograd.grad(without_own(o, v).sum(), (o, v)):
        assert gradient.isfinite().all()
    inputs = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(without_own, tuple(inputs))


@pytest.mark.parametrize("name", MAPS)
def test_a_key_bias_is_a_key_of_value_nothing_beside_the_others(name):
    """Each map from its own softmax over one more key, by hand."""
    keys = {"position": "none", "normalizer": "key", **MAPS[name]}
    if name == "differential":
        keys["head_norm"] = "none"
    model = _model(**keys).double()
    seen = _seen(model, _ids())
    attention = model.model.layers[1].self_attn
    groups, x = model.config.num_key_value_heads, seen["x"]
    q, k, v = (
        (x @ p.weight.T).unflatten(-1, (-1, 8)).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    bias = attention.normalizer.key
    outputs = []
    for query in range(q.shape[1]):
        pair = name == "differential"
        group = query // 2 // (4 // groups) * 2 + query % 2 if pair else query * groups // len(q[0])
        null = (q[:, query] @ bias[group])[..., None]
        scores = torch.cat([null, q[:, query] @ k[:, group].mT], -1) / 8**0.5
        scores[..., 1:].masked_fill_(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        of = [group // 2 * 2, group // 2 * 2 + 1] if pair else [group]
        value = torch.cat([v[:, g] for g in of], -1)
        outputs.append(scores.softmax(-1)[..., 1:] @ value)
    lam = attention.maps.lambdas(x)
    if name == "differential":
        gain = 1 - attention.maps.lambda_init
        outputs = [gain * (a - lam * b) for a, b in zip(outputs[0::2], outputs[1::2], strict=True)]
    if name == "differential-v2":
        pairs = zip(outputs[0::2], outputs[1::2], strict=True)
        outputs = [a - lam[:, head] * b for head, (a, b) in enumerate(pairs)]
    assert torch.allclose(torch.cat(outputs, -1), seen["heads"], atol=1e-6)


@pytest.mark.parametrize("keys", MEETINGS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_what_it_meets(keys, tmp_path):
    """Eager is the oracle of logits and all gradients; every parameter learns; caches give the full
    forward; it reloads."""
    model, ids = _model(**keys), _ids()
    model.save_pretrained(tmp_path)
    again = ClearheadForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    space.decodes(model)
    space.eager_agrees(model, ids)


def _forgetting(**keys: object) -> ClearheadForCausalLM:
    """With gates far apart, as after training."""
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | {"position": "forget"} | keys))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate_proj.bias"):
                p.normal_(1, 2)
    return model.eval()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_layer_and_all_its_gradients_are_the_formula_s(groups):
    """Heads that share a key have a gate each."""
    model, ids = _forgetting(num_key_value_heads=groups).double(), _ids()
    attention = model.model.layers[1].self_attn
    seen: dict[str, Tensor] = {}
    attention.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    model(ids, use_cache=False)
    x = seen["x"]
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
    agree(seen["out"], want, (x, *attention.parameters()), bound=1e-11)


@pytest.mark.parametrize("maps", ["single", "differential", "differential-v2"])
def test_gates_of_one_value_for_all_tokens_are_alibi(maps):
    """f = exp(−slope): the same scores, also of maps that share a head's slope."""
    alibi = ClearheadForCausalLM(space.config(position="alibi", maps=maps)).eval()
    forget, ids = _forgetting(maps=maps), _ids()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_cached_decoding_in_half_precision_has_the_gates_of_the_full_forward(dtype):
    """No nearer than a rounding of the output, over sums of gates that no half number holds."""
    model, ids = _forgetting(num_hidden_layers=1).to(dtype), _ids(length=24)
    whole, cache = model(ids, use_cache=False).logits, DynamicCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=0.02 * float(whole.abs().max()))


def test_gates_start_at_one_half():
    """As in the authors' code: no bias, weights as any matrix."""
    model = ClearheadForCausalLM(preset("forget", **space.WHOLE | {"initializer_range": 0.02}))
    for layer in model.model.layers:
        gate = layer.self_attn.decay.gate_proj
        assert not gate.bias.any()
        assert float(gate.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
