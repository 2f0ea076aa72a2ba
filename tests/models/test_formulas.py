"""Every mechanism in whole models: the formulas' numbers and gradients, caches, reloading."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models import PRESETS
from clearhead.nn.softpick import Softpick
from clearhead.nn.xsa import without_own
from clearhead.ops.visibility import Visibility

from . import reference, space

OLD = {"values": "reparametrised", "projections": "reparametrised", "value_gain": 0.2}
PLAIN = {"maps": "differential", "head_norm": "none"}
# Every attention that C is defined for, at a block each.
SHAPED = [
    (
        ("skipless", "sas", "sas-p")[number % 3],
        maps | {"normalizer": normalizer, "position": "none"},
    )
    for number, (normalizer, maps) in enumerate(
        product(("softmax", "softmax1", "sink"), ({}, PLAIN, {"maps": "differential-v2"}))
    )
]
POINTS: list[tuple[str, dict[str, Any]]] = [
    *SHAPED,
    ("skipless", {"shaping": "skipinit"}),
    ("transformer", OLD | {"value_init": "orthogonal", "head_dim": 4}),
    ("sas", OLD | {"first_values": None}),
    ("sas", {"mlp_skip_gain": 0.7, "scores": "coca", "query_range": 0.3}),
    ("sas-p", {"scores": "coca-slack", "query_range": 0.3}),
    ("skipless", {"scores": "coca-strict", "query_range": 0.3, "num_key_value_heads": 4}),
    ("gated", {"maps": "differential", "normalizer": "key"}),
    ("gated", {"shaping": "shaped", "query_range": 0.3, "normalizer": "key"}),
    ("gated", {"scores": "coca", "maps": "differential-v2"}),
    ("gated-headwise", {"maps": "differential"}),
    ("xsa", {"maps": "differential", "position": "alibi", "normalizer": "softmax1"}),
    ("xsa", {"maps": "differential-v2", "normalizer": "key", "sliding_window": 3}),
    ("xsa", {"order": "parallel", "values": "identity", "head_dim": 4}),
    ("xsa", {"num_key_value_heads": 1}),
    ("key-value", {"maps": "differential", "prefix_length": 2}),
    ("key-value", {"position": "alibi", "sliding_window": 3}),
    ("key-value", {"position": "xpos", "qk_norm": "rmsnorm", "num_key_value_heads": 1}),
    ("key-bias", {"maps": "differential-v2", "position": "none"}),
    ("pope", {"maps": "differential", "num_key_value_heads": 4}),
    ("pope", {"maps": "differential-v2", "normalizer": "softpick"}),
    ("softpick", {"maps": "differential", "sliding_window": 3}),
    ("forget", {"num_key_value_heads": 1}),
    ("forget", {"maps": "differential", "num_key_value_heads": 4}),
    ("alibi", {"maps": "differential-v2"}),
    ("differential", {"lambda_init": 0.8, "head_norm": "plain"}),
    ("transformer", {"position": "sinusoidal", "mlp": "gelu-exact", "qk_norm": "rmsnorm"}),
    ("gpt2", {"mlp_rotation": "hadamard", "sliding_window": 4, "normalizer": "sink"}),
    ("osp", {"tie_word_embeddings": False, "mlp": "geglu"}),
]
HYBRID = {"num_hidden_layers": 4, "sliding_window": 4}
HYBRID |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
WINDOWS = [
    *((name, {}) for name in ("sink", "differential-v2", "coca", "alibi", "xpos", "key-value")),
    ("differential", {"normalizer": "softmax1"}),
    ("forget", {"normalizer": "sink"}),
    ("transformer", {"shaping": "shaped", "query_range": 0.3, "normalizer": "softmax1"}),
    *(
        ("transformer", {"layer_overrides": overrides})
        for overrides in (
            [{}, {}, {}, {"position": "none"}],
            [*[{"position": "forget"}] * 3, {}],
            [*[{"position": "alibi"}] * 3, {}],
            [{}, {"maps": "differential"}],
            [{"scores": "coca"}, {}],
        )
    ),
]
POINTS += [(name, HYBRID | keys) for name, keys in WINDOWS]
CASES = [*((name, {}) for name in PRESETS), *POINTS]
BOTH_WAYS = [
    *("bert", "transformer", "gpt2", "differential", "differential-v2", "softmax1", "sink"),
    *("coca", "coca-strict", "coca-slack", "sas"),
]
PACKED = {
    "document_ids": torch.tensor([[0, 1, 0, 0, 1, 2, 1, 0, 2, 2, 1], [0] * 2 + [3] * 9]),
    "attention_mask": torch.tensor([[1] * 11, [1] * 8 + [0] * 3]),
}
LONG = torch.tensor([[0] * 3 + [1] * 8, [1] * 11])


def _model(name: str, keys: dict[str, Any]) -> Any:
    """None of its numbers is where its paper starts it."""
    narrow = {"head_dim": 4} if "values" in PRESETS[name] else {}
    config = preset(name, **space.SHAPE | narrow | keys)
    torch.manual_seed(0)
    causal = config.direction == "causal"
    return space.stirred((ClearheadForCausalLM if causal else ClearheadForMaskedLM)(config))


def _named(part: Any) -> str:
    return part if isinstance(part, str) else "-".join(map(str, part.values()))


@pytest.mark.parametrize(("name", "keys"), CASES, ids=_named)
def test_logits_gradients_and_attentions_are_those_of_the_formulas(name, keys):
    """Of whole rows, and of packed ones, where texts may alternate, before padding."""
    model = _model(name, keys).double()
    for inputs in ({}, PACKED):
        reference.holds(model, space.ids(), **inputs)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_both_directions_and_padding_on_the_left(name):
    model = _model(name, {"direction": "bidirectional"}).double()
    reference.holds(model, space.ids(), attention_mask=LONG)


@pytest.mark.parametrize(("name", "keys"), POINTS, ids=_named)
def test_caches_give_the_full_forward_and_a_saved_model_the_same_bits(name, keys, tmp_path):
    model, ids = _model(name, keys), space.ids()
    model.save_pretrained(tmp_path)
    again = ClearheadForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    # Softpick divides by scores near 0, which multiplies the rounding of float32.
    space.decodes(model.double() if model.config.normalizer == "softpick" else model)


@pytest.mark.parametrize("size", [1e-6, 1e3, 1e5])
def test_softpick_of_low_and_high_logits_is_finite(size):
    """In float32, over more rows than one tile; the weights' ratio at low ones is the scores'."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 131, 4, requires_grad=True) for _ in range(3))
    out = Softpick.attend(q * size, k, v, visibility=Visibility(), scale=1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    exact = (q.double() * size) @ k.double().mT
    term = exact * torch.ones(131, 131).tril()
    if size < 1:
        want = term.relu() / term.abs().sum(-1, keepdim=True) @ v.double()
        assert torch.allclose(out.double(), want, atol=1e-4)
    nothing = (term <= 0).all(-1)
    assert nothing.any()
    assert not out[nothing].any()


def test_a_value_of_nothing_takes_nothing_away():
    o, v = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    assert torch.equal(without_own(o, v), o)
    for gradient in torch.autograd.grad(without_own(o, v).sum(), (o, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_cached_decoding_in_half_precision_has_the_gates_of_the_full_forward(dtype):
    """No nearer than a rounding of the output, over sums of gates that no half number holds."""
    model, ids = _model("forget", {"num_hidden_layers": 1}), space.ids(length=24)
    model.model.layers[0].self_attn.decay.gate_proj.bias.normal_(1, 2)  # far apart
    whole, cache = model.to(dtype)(ids, use_cache=False).logits, DynamicCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=0.02 * float(whole.abs().max()))


def test_where_the_papers_start():
    """Waves of 1/√C, gates without a bias, phases of 0; keys are cached in the head's width."""
    shape = space.WHOLE | {"initializer_range": 0.02}
    bert = ClearheadForMaskedLM(preset("bert", **shape))
    assert bert.model.position.scale.item() == pytest.approx(32**-0.5)
    for layer in ClearheadForCausalLM(preset("forget", **shape)).model.layers:
        gate = layer.self_attn.decay.gate_proj
        assert not gate.bias.any()
        assert float(gate.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    for name in ("sink", "key-bias", "key-value"):  # so that they start as softmax-1
        model = ClearheadForCausalLM(preset(name, **shape))
        assert not any(p.any() for key, p in model.named_parameters() if ".normalizer." in key)
    pope = ClearheadForCausalLM(preset("pope", **shape)).eval()
    assert not any(layer.self_attn.scores.phase_bias.any() for layer in pope.model.layers)
    assert pope(space.ids()).past_key_values.layers[0].keys.shape[-1] == 8


PLACES = space.attentions()
FAR = 1e-4  # of the largest entry: float32 sums in another order, through two layers


def _results(model: Any, device: str, **inputs: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits of shown tokens, loss and every gradient, on the CPU in float64."""
    there = copy.deepcopy(model).to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with torch.no_grad():
        logits = there(**inputs).logits
    loss = there(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in there.parameters()]
    shown = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    found = logits[shown].cpu().double(), loss.detach().cpu().double()
    return *found, [gradient.cpu().double() for gradient in gradients]


@pytest.mark.gpu
@pytest.mark.parametrize(("scores", "position"), PLACES)
def test_every_attention_of_a_gpu_is_that_of_the_cpu(scores, position):
    """Of whole rows, padded ones, and packed documents."""
    ids = torch.randint(4, 31, (2, 21))
    mask, place = torch.ones_like(ids), torch.arange(21).expand_as(ids)
    mask[0, :7] = 0
    packed = {"position_ids": place % 10, "document_ids": place // 10}
    for point in PLACES[scores, position]:
        model = ClearheadForCausalLM(space.config(**point))
        for extra in ({}, {"attention_mask": mask}, packed):
            got, want = (_results(model, on, input_ids=ids, **extra) for on in ("cuda", "cpu"))
            for found, exact in zip(got[:2], want[:2], strict=True):
                assert (found - exact).abs().max() <= FAR * exact.abs().max().clamp_min(1e-3)
            largest = max(float(gradient.abs().max()) for gradient in want[2])
            for found, exact in zip(got[2], want[2], strict=True):
                assert (found - exact).abs().max() <= FAR * largest
