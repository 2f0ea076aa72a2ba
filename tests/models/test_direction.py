"""Bidirectional models: every token sees the whole text, and nothing else changes."""

import pytest
import tests_models_space as space
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, ops, preset
from clearhead.diagnose import attention_maps
from clearhead.models import ClearheadModel, plan
from clearhead.nn import REGISTRY
from clearhead.ops import oracles

SHAPE = space.WHOLE | {"direction": "bidirectional"}
NAMES = [
    *("transformer", "gpt2", "differential", "differential-v2", "alibi", "xpos"),
    *("coca", "coca-strict", "coca-slack", "softmax1", "sink"),
]
# Where scores before a token and after it come from different vectors, with all that meets them.
MEETINGS = [
    {"position": position, **other}
    for position in ("alibi", "xpos")
    for other in (
        {"maps": "differential", "normalizer": "sink", "num_key_value_heads": 2},
        {"maps": "differential-v2", "normalizer": "softmax1", "num_key_value_heads": 1},
        {"maps": "differential", "normalizer": "softmax1"},
    )
] + [{"position": "xpos", "scores": f"collinear{form}"} for form in ("", "-strict", "-slack")]
DYNAMIC_CAUSAL = {"rope_type": "dynamic-causal", "factor": 4.0}


def _model(name: str, **overrides: object) -> ClearheadModel:
    return ClearheadModel(preset(name, **SHAPE | overrides)).eval()


def _ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 61, (batch, length))


def _run(model: ClearheadModel, ids: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **options).last_hidden_state


@pytest.mark.parametrize("name", NAMES)
def test_the_first_token_sees_the_last_and_causally_it_does_not(name):
    ids = _ids()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    model = _model(name)
    assert (_run(model, ids) - _run(model, other))[:, 0].abs().max() > 1e-4
    causal = _model(name, direction="causal")
    causal.load_state_dict(model.state_dict())
    assert torch.equal(_run(causal, ids)[:, 0], _run(causal, other)[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_eager_is_the_oracle(name):
    model, ids = _model(name), _ids()
    fast = _run(model, ids)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    assert torch.allclose(out.last_hidden_state, fast, atol=2e-5)
    assert (out.attentions[0][:, :, 0, 1:] != 0).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, ids, padding = _model(name), _ids(1, 9), _ids(1, 4)
    mask = torch.ones(1, 13, dtype=torch.long)
    kept = slice(4, None) if side == "left" else slice(0, 9)
    mask[:, : kept.start] = 0
    mask[:, kept.stop or 13 :] = 0
    padded = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    got = _run(model, padded, attention_mask=mask)[:, kept]
    assert torch.allclose(got, _run(model, ids), atol=2e-5)


@pytest.mark.parametrize("keys", MEETINGS, ids=str)
def test_two_sided_scores_with_every_other_axis(keys):
    """Against eager, the oracle; padded on either side; gradients of every parameter."""
    model, ids = _model("transformer", **keys), _ids(1, 9)
    want = _run(model, ids)
    for mask, kept in (([0] * 3 + [1] * 9, slice(3, None)), ([1] * 9 + [0] * 3, slice(9))):
        padding = _ids(1, 3)
        padded = torch.cat([padding, ids] if mask[0] == 0 else [ids, padding], 1)
        got = _run(model, padded, attention_mask=torch.tensor([mask]))[:, kept]
        assert torch.allclose(got, want, atol=2e-5)
    gradients = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(ids).last_hidden_state
        assert torch.allclose(out, want, atol=2e-5)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, fast in gradients[0].items():
        exact = gradients[1][name]
        assert (fast - exact).abs().max() <= 1e-4 * exact.abs().max(), name


def _attention(q: Tensor, k: Tensor, v: Tensor, position: str) -> Tensor:
    """What the layer of a position computes from float64 queries, keys and values, by softmax-1."""
    layer = ClearheadConfig(
        **{**SHAPE, "position": position, "normalizer": "softmax1", "max_position_embeddings": 2048}
    ).layer(0)
    module = REGISTRY.find("position", position).build(layer, q.shape[1])
    at = _places(q)
    (part,) = module.parts(at, at)
    q, k = (
        part.prepared(module.prepare, q, part.queries),
        part.prepared(module.prepare, k, part.keys),
    )
    return ops.attend(q, k, v, causal=False, sink=0.0, scale=8**-0.5, by_side=part.by_side)


def _places(q: Tensor) -> Tensor:
    return torch.stack([torch.arange(q.shape[2]), torch.arange(q.shape[2]) * 40 + 100])


@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize("position", ["alibi", "xpos"])
def test_distance_counts_alike_in_both_directions(position, length):
    """Outputs and gradients against the formulas, float64 but for the float32 tables."""
    inputs = [torch.randn(2, 4, length, 8, dtype=torch.float64) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in inputs)
    at = _places(q)
    if position == "alibi":
        scores = q @ k.mT * 8**-0.5 - oracles.alibi_bias(at, at, 4).abs()
    else:
        scores = oracles.xpos_scores(q, k, at, at, 10_000.0) * 8**-0.5
    weights = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    want, got = weights @ v, _attention(q, k, v, position)
    grad = torch.randn_like(want)
    found, expected = (
        [o, *torch.autograd.grad(o, inputs, grad, retain_graph=True)] for o in (got, want)
    )
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 1e-4 * b.abs().max()


@pytest.mark.parametrize("position", ["alibi", "xpos"])
def test_a_text_read_backwards_is_the_text_mirrored(position):
    """ALiBi sees distance alone; xPos also turns, so that only conjugate queries would mirror."""
    model, ids = _model("transformer", position=position), _ids()
    mirrored = (_run(model, ids.flip(1)).flip(1) - _run(model, ids)).abs().max()
    assert mirrored < 2e-5 if position == "alibi" else mirrored > 1e-2


def test_without_a_position_a_text_is_a_bag_of_tokens():
    model, ids = _model("transformer", position="none"), _ids(length=9)
    order = torch.randperm(9)
    assert torch.allclose(_run(model, ids[:, order]), _run(model, ids)[:, order], atol=2e-5)


@pytest.mark.parametrize("name", ["transformer", "coca"])
def test_dynamic_causal_takes_its_base_from_the_reach_in_powers_of_two(name):
    """Of 11 and of 16 tokens from the length 16, each row its own; within 8 there is none."""
    shape = {"max_position_embeddings": 8}
    model = _model(name, rope_parameters=DYNAMIC_CAUSAL, **shape)
    weights = model.state_dict()
    long, short = _ids(1, 11), _ids(1, 8)
    base = float(ops.dynamic_theta(1e4, 4.0, 8, torch.tensor(16), 8))
    for ids, theta in ((short, 1e4), (long, base)):
        fixed = _model(name, rope_parameters={"rope_type": "default", "rope_theta": theta}, **shape)
        fixed.load_state_dict(weights)
        assert torch.allclose(_run(model, ids), _run(fixed, ids), atol=2e-5)
    rows = torch.cat([long, torch.cat([_ids(1, 3), short], 1)])
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    got = _run(model, rows, attention_mask=mask)
    assert torch.allclose(got[1, 3:], _run(model, short)[0], atol=2e-5)
    assert torch.allclose(got[0], _run(model, long)[0], atol=2e-5)


@pytest.mark.parametrize("position", ["alibi", "xpos"])
def test_documents_see_only_themselves(position):
    model, first, second = _model("transformer", position=position), _ids(1, 6), _ids(1, 5)
    packed = torch.cat([first, second], 1)
    documents = torch.tensor([[0] * 6 + [1] * 5])
    got = _run(model, packed, document_ids=documents)
    assert torch.allclose(got[:, :6], _run(model, first), atol=2e-5)
    assert torch.allclose(got[:, 6:], _run(model, second), atol=2e-5)


@pytest.mark.parametrize("position", ["alibi", "xpos"])
def test_probes_see_both_sides(position):
    model, ids = _model("transformer", position=position), _ids(1, 9)
    (first, *_) = attention_maps(model, ids[0])
    model.set_attn_implementation("eager")
    want = model(ids, output_attentions=True).attentions[0][0, 0]
    assert torch.allclose(torch.tensor(first["weights"]), want, atol=1e-4)


def test_rotary_scaling_reaches_beyond_the_trained_length():
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = _model("coca", rope_parameters=rope, max_position_embeddings=8)
    plain = _model("coca", max_position_embeddings=8)
    plain.load_state_dict(model.state_dict())
    short, long = _ids(length=8), _ids(length=11)
    assert torch.allclose(_run(model, short), _run(plain, short), atol=1e-6)
    assert (_run(model, long) - _run(plain, long)).abs().max() > 1e-3


def test_what_needs_a_direction_is_refused():
    with pytest.raises(ClearheadError, match="build ClearheadForMaskedLM"):
        ClearheadForCausalLM(preset("transformer", **SHAPE))
    with pytest.raises(ClearheadError, match="needs direction='causal'"):
        _model("transformer")(_ids(), past_key_values=DynamicCache())
    assert _model("transformer")(_ids(), use_cache=True).past_key_values is None


def test_a_plan_counts_twice_the_scores():
    causal, both = (
        plan(preset("transformer", direction=direction), length=101)
        for direction in ("causal", "bidirectional")
    )
    assert both.parameters == causal.parameters
    assert both.forward_flops - causal.forward_flops == 4 * 4 * 192 * 50
