"""Trained models in another basis or at another point of the axes: the same function."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.eval.sliding import distance
from clearhead.models import plan
from clearhead.models.conversion import converted
from clearhead.models.families.family import merged
from clearhead.models.rotated import LIMIT, equalised, learned_rotation, rotated
from clearhead.models.starts import started, target
from clearhead.optim import build_optimizer
from clearhead.quantize import linear_layers
from clearhead.settings.train import TrainConfig

from . import space
from .space import WHOLE, displaced

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys shared": {"num_key_value_heads": 1},
    "biases": {"bias": True},
    "one gain a norm": {"norm": "rmsnorm-single"},
    "head of its own": {"tie_word_embeddings": False},
    "parallel": {"order": "parallel"},
    "V2": {"maps": "differential-v2"},
    "xsa": {"epilogue": "xsa"},
    "shaped": {"shaping": "shaped", "attention_skip": "none"},
    "softmax-1, alibi": {"normalizer": "softmax1", "position": "alibi"},
    "forget": {"position": "forget"},
    "norms of queries and keys": {"qk_norm": "rmsnorm"},
    "plain MLP, turned": {"mlp": "gelu", "mlp_rotation": "hadamard"},
}


@pytest.mark.parametrize(
    ("parts", "learn"),
    [(("residual",), True), *((each, False) for each in (("values",), ("residual", "values")))],
    ids=str,
)
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_a_rotated_model_is_the_same_function_in_other_weights(keys, parts, learn):
    model = space.uneven(**keys)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3] *= 6
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = rotated(model, parts, learn=learn)
    torch.testing.assert_close(space.logits(made), space.logits(model), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    own = made.state_dict()
    turned = {"residual": "self_attn.q_proj.weight", "values": "self_attn.v_proj.weight"}
    for part in parts:
        name = f"model.layers.1.{turned[part]}"
        assert not torch.allclose(own[name], before[name])
    if learn:
        name = "model.layers.0.self_attn.q_proj.weight"
        drawn = rotated(model, parts).state_dict()[name].abs().max()
        assert own[name].abs().max() < 0.95 * drawn


def test_a_tied_head_stays_tied_behind_a_square_matrix_or_none():
    for keys, projected in (({}, True), ({"norm": "rmsnorm-single"}, False)):
        model = space.uneven(**keys)
        once = rotated(model, ("residual",))
        for made in (once, rotated(once, ("residual",), seed=1)):
            assert made.lm_head.weight is made.model.embed_tokens.weight
            assert made.config.embedding_projection is projected
            more = sum(one.numel() for one in made.parameters()) - model.num_parameters()
            assert more == 2 * 16**2 * projected
            torch.testing.assert_close(space.logits(made), space.logits(model))


def test_a_channel_that_stands_out_is_spread_over_all():
    model = space.uneven()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] *= 1000
    found = [
        one(torch.arange(11)[None], output_hidden_states=True).hidden_states[1].detach().abs()
        for one in (model, rotated(model, ("residual",)))
    ]
    first, then = (float((x.amax(-1) / x.square().mean(-1).sqrt()).mean()) for x in found)
    assert first > 3.5  # of 16 channels one holds nearly all: √16 = 4
    assert then < 3


OWN_VALUES = {"values": "identity", "head_dim": 4, "num_value_heads": 4}


@pytest.mark.parametrize(
    ("parts", "keys", "named"),
    [
        (("residual",), {"norm": "layernorm"}, "norm='layernorm'"),
        (("residual",), {"norm": "none"}, "norm='layernorm'"),  # of its first layer
        (("residual",), {"embedding_norm": "rmsnorm"}, "embedding_norm='rmsnorm'"),
        (("residual",), OWN_VALUES, "values='identity'"),
        (("residual",), {"position": "learned"}, "position='learned' is added"),
        (("values",), {"maps": "differential"}, "maps='differential'"),
        (("values",), {"epilogue": "gate"}, "epilogue='gate'"),
        (("values",), {"normalizer": "key-value"}, "normalizer='key-value'"),
    ],
)
def test_mechanisms_that_tell_channels_apart_are_refused(parts, keys, named):
    with pytest.raises(ClearheadError, match=named):
        rotated(space.uneven(**keys), parts)


WIDTH = 64
PLAIN = torch.eye(WIDTH).double()


def _matrices(rows: int = 400) -> list[torch.Tensor]:
    """Normal numbers with some rows of two to four times the usual size, and in one basis already
    evened out, as a random rotation leaves them."""
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, WIDTH, generator=draw) for _ in range(3)]
    for matrix in matrices:
        matrix[:6] *= torch.linspace(2, 4, 6)[:, None]
    return matrices


def _largest(matrices: list[torch.Tensor]) -> list[float]:
    return [float(one.abs().max() / one.square().mean().sqrt()) for one in matrices]


def test_a_learned_rotation_is_orthogonal_and_leaves_no_entry_that_stands_out():
    matrices = _matrices()
    turn = learned_rotation(iter(matrices), PLAIN)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(WIDTH).double(), rtol=0, atol=1e-12)
    before, after = _largest(matrices), _largest([one.double() @ turn for one in matrices])
    assert min(before) > 7
    assert max(after) < LIMIT + 1
    torch.testing.assert_close(learned_rotation(iter(matrices), PLAIN), turn, rtol=0, atol=0)
    turned = [one.double() @ turn for one in matrices]
    further = learned_rotation(iter(matrices), turn)  # is learned beyond the first
    assert max(_largest([one @ further for one in turned])) < max(after) + 0.1


def test_rows_of_one_size_and_zeros_are_left_as_they_are():
    matrices = [torch.ones(5, WIDTH), torch.zeros(3, WIDTH)]
    turn = learned_rotation(iter(matrices), PLAIN)
    torch.testing.assert_close(turn, torch.eye(WIDTH).double(), rtol=0, atol=0)


TURNED: dict[str, Any] = {"mlp_rotation": "hadamard"}
GATED: dict[str, dict[str, Any]] = {
    "swiglu": TURNED,
    "geglu": {**TURNED, "mlp": "geglu"},
    "biases": {**TURNED, "bias": True},
    "parallel": {**TURNED, "order": "parallel"},
    "by layer": {**TURNED, "layer_overrides": [{}, {"mlp": "geglu"}]},
}


def _uneven_rows(**keys: Any) -> ClearheadForCausalLM:
    model = space.uneven(**keys)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] *= 20
    return model


@pytest.mark.parametrize("keys", GATED.values(), ids=GATED)
def test_rows_of_one_size_are_the_same_function(keys):
    model = _uneven_rows(**keys)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = equalised(model)
    torch.testing.assert_close(space.logits(made), space.logits(model), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for old, new in zip(model.model.layers, made.model.layers, strict=True):
        sizes, were = (one.mlp.up_proj.weight.abs().amax(1) for one in (new, old))
        torch.testing.assert_close(sizes, were.median().expand_as(sizes))
        assert were.max() > 1.2 * were.median()


@pytest.mark.parametrize("zeros", [1, 40, None], ids=["one", "most", "all"])
def test_rows_of_zeros_stay_zeros_and_a_bias_finite(zeros):
    """A row of hardly any weight is enlarged a thousandfold at most, and its bias with it."""
    model = _uneven_rows(**TURNED, bias=True)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[:zeros] = 0
        model.model.layers[0].mlp.up_proj.weight[2] *= 1e-30
    made = equalised(model)
    assert not made.model.layers[1].mlp.up_proj.weight[:zeros].any()
    biases = [one.model.layers[0].mlp.up_proj.bias[2] for one in (made, model)]
    torch.testing.assert_close(biases[0], 1000 * biases[1])
    torch.testing.assert_close(space.logits(made), space.logits(model), rtol=1e-9, atol=1e-9)


def test_what_cannot_be_made_equal_is_refused():
    with pytest.raises(ClearheadError, match=r"mlp='gelu' has a function .* swiglu or geglu"):
        equalised(_uneven_rows(mlp="gelu"))
    with pytest.raises(ClearheadError, match="rows' sizes to columns: give --rotate down too"):
        equalised(_uneven_rows())


@torch.no_grad()
def test_projections_start_orthogonal_and_make_up_for_themselves_in_the_mlp():
    model = ClearheadForCausalLM(preset("osp", **WHOLE))
    parts = model.model.project_in.weight, model.model.project_out.weight
    for weight in parts:
        assert torch.allclose(weight @ weight.T, torch.eye(32), atol=1e-5)
    assert not torch.equal(*parts)
    assert all(p.numel() == 1 for name, p in model.named_parameters() if "norm" in name)
    assert plan(preset("osp")).forward_flops == pytest.approx(
        plan(preset("transformer")).forward_flops, rel=0.01
    )


def test_muon_steps_the_projections_and_adamw_the_embeddings_and_gains():
    model = ClearheadForCausalLM(preset("osp", **WHOLE, tie_word_embeddings=False))
    optimizer: Any = build_optimizer(model, TrainConfig(optimizer="muon"))
    names = {p: name for name, p in model.named_parameters()}
    muon = {names[p] for group in optimizer._parts[0].param_groups for p in group["params"]}
    assert {"model.project_in.weight", "model.project_out.weight"} <= muon
    rest = names.keys() - {p for p, name in names.items() if name in muon}
    assert {names[p] for p in rest if p.ndim == 2} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert {p.numel() for p in rest if p.ndim == 1} == {1}


@torch.no_grad()
def test_projections_are_merged_where_they_are_of_no_use_any_more():
    for tied, norm in ((True, "rmsnorm-single"), (False, "rmsnorm")):
        config = preset("osp", **WHOLE, tie_word_embeddings=tied, norm=norm)
        model = displaced(config, 0.1).double()
        wanted = model(IDS).logits
        turned = rotated(model, ("residual", "values"))
        for one in (merged(model), turned):
            projected = one is turned and tied
            assert one.config.embedding_projection is projected
            assert one.config.tie_word_embeddings is projected
            assert (one(IDS).logits - wanted).abs().max() < 1e-10 * wanted.abs().max()
            # Few bits leave the projections alone, as they do the embedding and the head.
            assert linear_layers(one).keys() == linear_layers(model).keys()
    llama = converted(model.float())
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert (llama(IDS).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


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


@torch.no_grad()
def _logits(model: ClearheadForCausalLM) -> torch.Tensor:
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


OTHERS = ["softmax1", "xsa", "coca", "coca-strict", "coca-slack", "key-value", "alibi", "forget"]


@pytest.mark.parametrize("name", [*OTHERS, "sas-p"])
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
