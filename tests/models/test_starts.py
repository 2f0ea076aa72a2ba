"""A trained model on another point of the axes: the function is kept, or the weights are."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.eval.sliding import distance
from clearhead.models.starts import started, target

from .space import WHOLE

# As SmolLM2 has them: nine query heads, three key heads.
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
SHAPE = WHOLE | {"hidden_size": 36} | HEADS
IDS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))


def _model(name: str = "transformer", **changes: Any) -> ClearheadForCausalLM:
    torch.manual_seed(1)
    model = ClearheadForCausalLM(preset(name, **SHAPE | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _logits(model: ClearheadForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("differential-v2", {}),
        ("gated", {}),
        ("sink", {}),
        ("gated", {"maps": "differential-v2", "normalizer": "sink"}),
        (None, {"qk_norm": "none", "order": "sequential"}),
        (None, {"mlp_rotation": "hadamard"}),
        (None, {"embedding_projection": True}),
        ("softmax1", {"annealed_start": True}),
        ("sink", {"annealed_start": True}),
        ("xsa", {"annealed_start": True}),
    ],
)
def test_these_starts_keep_the_function(name, settings, bias):
    model = _model(bias=bias)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    start = started(model, target(name, settings))
    wanted = _logits(model)
    assert (_logits(start.model) - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    assert start.dropped == ()
    if "mlp_rotation" in settings:  # and is turned back
        down = "model.layers.0.mlp.down_proj.weight"
        back = started(start.model, {"mlp_rotation": "none"}).model
        for turned, alike in ((start.model, False), (back, True)):
            assert torch.allclose(turned.state_dict()[down], before[down], atol=1e-6) == alike
    assert all(
        name.endswith((".offset", ".strength", "project_in.weight", "project_out.weight"))
        for name in start.new
    )
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_v2_and_the_gate_start_as_their_papers_say_and_learn():
    start = started(_model(), target("gated", {"maps": "differential-v2"})).model
    attention = start.model.layers[0].self_attn
    x = torch.randn(1, 3, 36)
    assert bool((attention.maps.lambdas(x) == 0.5).all())
    start(IDS, labels=IDS).loss.backward()
    for weight in (attention.maps.lambda_proj.weight, attention.epilogue.gate_proj.weight):
        assert bool((weight == 0).all())
        assert float(weight.grad.abs().max()) > 1e-6


def test_a_sink_takes_the_place_of_softmax1_and_one_that_rests_deep_can_go():
    model = _model("softmax1")
    start = started(model, target("sink", {})).model
    assert torch.allclose(_logits(start), _logits(model), atol=1e-6)
    assert not start.model.layers[0].self_attn.normalizer.logit.any()
    model = _model("sink")
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.normalizer.logit, -40.0)
    start = started(model, target("transformer", {"normalizer": "softmax"}))
    assert start.dropped == ("model.layers.*.self_attn.normalizer.logit",)
    assert torch.allclose(_logits(start.model), _logits(model), atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("softmax1", "xsa", "coca", "coca-strict", "coca-slack", "key-value", "alibi", "forget"),
        "sas-p",
    ],
)
def test_other_starts_keep_the_weights_that_have_a_place(name):
    model = _model()
    start = started(model, target(name, {}))
    apart = distance(model, start.model, IDS)
    assert apart["tokens"] == 24
    assert apart["divergence"] > 1e-3
    assert apart["relative"] > 1e-3
    again = started(model, target(name, {}))
    assert torch.equal(_logits(start.model), _logits(again.model))
    assert torch.equal(start.model.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_what_is_new_and_what_is_dropped_is_named():
    start = started(_model(), target("sas", {}))
    assert "model.layers.*.self_attn.v_proj.weight" in start.dropped
    assert "model.layers.*.self_attn.shaping.alpha" in start.new
    # Differential attention takes an even number of heads as they are.
    model = _model(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    start = started(model, target("differential", {}))
    assert "model.layers.*.self_attn.maps.lambda_q1" in start.new
    assert float(distance(model, start.model, IDS)["divergence"]) > 0.01


@pytest.mark.parametrize(
    ("source", "name", "settings", "said"),
    [
        ("transformer", "differential", {}, "num_attention_heads=9 is odd"),
        ("transformer", None, {"hidden_size": 12}, "hidden_size is a size of the model's weights"),
        ("transformer", None, {"normaliser": "sink"}, "did you mean normalizer"),
        ("transformer", "gate", {}, "unknown preset 'gate': did you mean gated"),
        ("transformer", "gated", {"projections": "identity"}, "has no W_O to double"),
        ("sas", "gated", {}, "has no W_O to double"),
        ("transformer", "gated", {"annealed_start": True}, "no effect without a null key or XSA"),
        ("sink", "xsa", {"annealed_start": True}, "without this model's normalizer='sink'"),
        ("sink", "gated", {"annealed_start": True}, "without this model's normalizer='sink'"),
        ("softmax1", "sink", {"annealed_start": True}, "this model's normalizer='softmax1'"),
        ("xsa", "sink", {"annealed_start": True}, "without this model's epilogue='xsa'"),
        ("differential-v2", None, {"maps": "single"}, r"is \(72, 36\), and maps='single' needs"),
        ("transformer", "skipless", {}, r"v_proj.weight is \(12, 36\), .* needs \(36, 36\)"),
        ("transformer", "bert", {}, "needs direction='causal'"),
    ],
)
def test_what_cannot_start_is_refused_in_a_line(source, name, settings, said):
    with pytest.raises(ClearheadError, match=said) as error:
        started(_model(source), target(name, settings))
    assert "\n" not in str(error.value)


def test_equal_models_are_at_no_distance():
    model = _model()
    found = distance(model, model, IDS)
    assert [found[key] for key in ("divergence", "largest", "relative")] == [0.0, 0.0, 0.0]
    assert found["perplexity"] == found["perplexity_before"]
    with torch.no_grad():
        loss = model(IDS, labels=IDS).loss
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
