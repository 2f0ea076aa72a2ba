"""The simplified blocks: their start, matrices, counts, options; the papers' equations; caches."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadForCausalLM, preset
from clearhead.models import ClearheadModel, plan
from clearhead.nn import block_of, initialise
from clearhead.nn.bases import PositionTables
from clearhead.ops.visibility import Visibility
from tests.ops.agreement import agree

from . import space
from .space import stirred

SHAPE = space.SHAPE | {"head_dim": 4}
BLOCKS = ["parallel", "skipless", "sas", "sas-p", "sas-p-nonorm"]
# Every attention that C is defined for, at a kind of scores and positions each.
COMBINATIONS = [
    {"normalizer": normalizer, "maps": maps, "num_key_value_heads": groups}
    for normalizer in ("softmax", "softmax1", "sink")
    for maps in ("single", "differential", "differential-v2")
    for groups in (4, 2)
]


def make_config(name: str, **keys: object) -> ClearheadConfig:
    if keys.get("maps") == "differential":
        keys["head_norm"] = "none"
    return preset(name, **SHAPE | keys)


random_ids = space.ids


SHAPED = [name for name in BLOCKS if name != "parallel"]


def _attention(config: ClearheadConfig, index: int = 1) -> nn.Module:
    block = block_of(config.layer(index))(config.layer(index))
    block.apply(lambda module: initialise(module, 0.02))
    return block.self_attn


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("keys", COMBINATIONS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_sub_block_starts_as_the_identity(keys, direction):
    """In float32, to the rounding of two ways to the same mean; with trained λ and sinks too."""
    attention = _attention(
        make_config(
            "sas",
            position="none" if direction == "causal" else "learned",
            direction=direction,
            **keys,
        )
    )
    with torch.no_grad():
        for name, p in attention.named_parameters():
            if "lambda" in name or "logit" in name:
                p += torch.randn_like(p)
    x = torch.randn(2, 23, 16)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :5] = False
    segments = torch.arange(23).expand(2, -1) // 9
    for masks in ({}, {"key_mask": mask}, {"segments": segments}):
        visibility = Visibility(direction == "causal", **masks)
        got = attention(x, tables=PositionTables(), visibility=visibility)
        assert (got - x).abs().max() < 2e-6


@pytest.mark.parametrize("name", SHAPED)
def test_the_first_step_s_gradients(name):
    """W_Q moves, W_K cannot yet, and what β gets γ gives (the notes on arXiv 2311.01906)."""
    model = ClearheadForCausalLM(make_config(name)).double()
    ids = random_ids()
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        attention = layer.self_attn
        assert (attention.q_proj.weight == 0).all()
        assert (attention.q_proj.weight.grad != 0).all()
        assert (attention.k_proj.weight.grad == 0).all()
        shaping = attention.shaping
        for gain in (shaping.alpha, shaping.beta, shaping.gamma):
            assert (gain == 1).all()
            assert (gain.grad != 0).all()
        assert torch.allclose(shaping.beta.grad, -shaping.gamma.grad, rtol=1e-6)


def test_skipinit_of_2023_moves_neither_queries_nor_keys_at_first():
    model = ClearheadForCausalLM(make_config("skipless", shaping="skipinit"))
    ids = random_ids()
    model(ids, labels=ids).loss.backward()
    attention = model.model.layers[1].self_attn
    assert (attention.shaping.alpha == 1).all()
    assert (attention.shaping.beta == 0).all()
    for linear in (attention.q_proj, attention.k_proj):
        assert (linear.weight.grad == 0).all()
    for moved in (attention.shaping.beta, attention.v_proj.weight, attention.o_proj.weight):
        assert (moved.grad != 0).all()
    weight = attention.v_proj.weight
    assert torch.allclose(weight @ weight.T, torch.eye(16), atol=1e-5)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("keys", COMBINATIONS[::2], ids=lambda k: "-".join(map(str, k.values())))
@torch.no_grad()
def test_output_attentions_are_the_shaped_matrix(keys, direction):
    model = stirred(ClearheadModel(make_config("sas-p", direction=direction, **keys)))
    ids = random_ids()
    seen = {}
    attention = model.layers[1].self_attn
    attention.register_forward_hook(lambda m, args, out: seen.update(z=args[0], out=out))
    fast = model(ids, use_cache=False).last_hidden_state
    model.set_attn_implementation("eager")
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        out = model(ids, output_attentions=True, use_cache=False, **options)
        matrix = out.attentions[1]
        heads = seen["z"].unflatten(-1, (matrix.shape[1], -1)).transpose(1, 2)
        product = (matrix @ heads).transpose(1, 2).flatten(2)
        assert torch.allclose(product, seen["out"], atol=1e-5)
        if not options:
            assert torch.allclose(out.last_hidden_state, fast, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "size", "published", "matrices"),
    [
        ("gpt2", "codeparrot", 167, 166.6),
        ("sas-p", "codeparrot", 146, 145.9),
        ("sas", "codeparrot", 146, 145.9),
        ("gpt2", "codeparrot-72", 379, 378.9),
        ("sas-p", "codeparrot-72", 295, 294.6),
    ],
)
def test_published_parameter_counts(name, size, published, matrices):
    """In millions, with 1,024 learned positions: all of them, and the matrices alone."""
    config = preset(name, size)
    assert round(plan(config).parameters / 1e6) == published
    with torch.device("meta"):
        model = ClearheadModel(config)
    counted = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert round(counted / 1e6, 1) == matrices
    assert config.max_position_embeddings == 1024
    assert config.mlp == "relu"
    assert preset(name, size, mlp="relu").intermediate_size == config.intermediate_size


def test_the_depth_rule_is_the_paper_s():
    """0.1 at L = 18; at half the MLP 0.2, and 0.1 at L = 72 (section 4.1 and figure 6)."""
    for layers, width, gain in ((18, 3072, 0.1), (18, 1536, 0.2), (72, 1536, 0.1)):
        keys = {"num_hidden_layers": layers, "intermediate_size": width}
        config = preset("sas", "codeparrot", **keys)
        assert config.layer(0).mlp_gain == pytest.approx(gain)
    assert preset("sas", "small").layer(0).mlp_gain == pytest.approx(0.1 * 1.5**0.5, rel=0.01)


def test_what_the_layers_of_the_blocks_have():
    """A first norm and a last; values in the first layer alone; the released code's gain."""
    model = ClearheadForCausalLM(make_config("sas-p-nonorm")).model
    kinds = [type(layer.input_layernorm).__name__ for layer in model.layers]
    assert (kinds, type(model.norm).__name__) == (["LayerNorm", "Identity"], "LayerNorm")
    plain = ClearheadForCausalLM(make_config("sas")).eval()
    kinds = [type(layer.self_attn.v_proj).__name__ for layer in plain.model.layers]
    assert kinds == ["Reparametrised", "Identity"]
    assert not [name for name, _ in plain.named_parameters() if "o_proj" in name]
    model, ids = ClearheadForCausalLM(make_config("sas", mlp_skip_gain=1.0)).eval(), random_ids()
    assert model.model.layers[0].mlp_skip_gain.gain.item() == 1.0
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_collinear_scores_shaped_from_a_stated_start():
    config = make_config("sas", scores="coca", query_range=0.3)
    model = ClearheadForCausalLM(config)
    assert (model.model.layers[0].self_attn.q_proj.weight != 0).all()
    ids = random_ids()
    model(ids, labels=ids).loss.backward()
    assert (model.model.layers[0].self_attn.q_proj.weight.grad != 0).any()


def _norm(x: Tensor, module: nn.Module) -> Tensor:
    if isinstance(module, nn.Identity):
        return x
    if isinstance(module, nn.LayerNorm):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * module.weight + module.bias
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight


def _mlp(x: Tensor, mlp: nn.Module) -> Tensor:
    gate = x @ mlp.gate_proj.weight.T
    return (gate * gate.sigmoid() * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def _product(x: Tensor, module: nn.Module) -> Tensor:
    """Values or a projection: a matrix, none, or eq. 6 with whatever it starts from."""
    if isinstance(module, nn.Identity):
        return x
    if isinstance(module, nn.Linear):
        return x @ module.weight.T
    start = dict(module.named_buffers()).get("initial", torch.eye(x.shape[-1], dtype=x.dtype))
    return x @ (module.alpha * start + module.beta * module.delta).T


def _matrix(shaping: nn.Module, weights: Tensor, mean: Tensor, head: int) -> Tensor:
    """Eqs. 4 and 5, and the annealed form, of one head."""
    own = torch.eye(len(mean), dtype=mean.dtype)
    if hasattr(shaping, "gamma"):
        shaped = shaping.alpha[head] * own + shaping.beta[head] * weights
        return shaped - shaping.gamma[head] * mean
    if hasattr(shaping, "alpha"):
        return shaping.alpha[head] * own + shaping.beta[head] * weights
    return weights


def _dense(model: ClearheadForCausalLM, ids: Tensor) -> Tensor:
    """The paper's equations 1 to 8 with T × T matrices, for 4 heads of width 4."""
    config = model.config
    x, length = model.model.embed_tokens(ids), ids.shape[1]
    bias = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
    for layer in model.model.layers:
        attention, z = layer.self_attn, _norm(x, layer.input_layernorm)
        value = _product(z, attention.v_proj)
        heads = []
        for h in range(4):
            rows = slice(4 * h, 4 * h + 4)
            q, k = (z @ p.weight[rows].T for p in (attention.q_proj, attention.k_proj))
            weights = (q @ k.mT / 2 + bias).softmax(-1)
            heads.append(
                _matrix(attention.shaping, weights, bias.softmax(-1), h) @ value[..., rows]
            )
        attended = _product(torch.cat(heads, -1), attention.o_proj)
        attended = attended * getattr(layer.attention_gain, "gain", 1)
        skipped = attended + (x if config.attention_skip == "identity" else 0)
        normed = z if config.order == "parallel" else _norm(skipped, layer.post_attention_layernorm)
        x = skipped + getattr(layer.mlp_gain, "gain", 1) * _mlp(normed, layer.mlp)
    return _norm(x, model.model.norm) @ model.lm_head.weight.T


REPARAMETRISED = {"values": "reparametrised", "projections": "reparametrised", "value_gain": 0.2}


# Every block of the papers, and the forms that are options of one.
FORMS = {
    **{name: (name, {}) for name in BLOCKS},
    "skipless-2023": ("skipless", {"shaping": "skipinit"}),
    "pre-ln-reparametrised": ("transformer", REPARAMETRISED | {"value_init": "orthogonal"}),
    "sas-reparametrised": ("sas", REPARAMETRISED | {"first_values": None}),
}


def _form(form: str, **keys: object) -> ClearheadForCausalLM:
    """With every number stirred."""
    name, changes = FORMS[form]
    return stirred(ClearheadForCausalLM(make_config(name, **changes | keys)))


@pytest.mark.parametrize("form", FORMS)
def test_the_paper_s_equations_in_float64(form):
    model = _form(form, position="none", num_key_value_heads=4).double()
    ids = random_ids()
    got, want = model(ids, use_cache=False).logits, _dense(model, ids)
    agree(got, want, list(model.parameters()), bound=1e-8)


DECODED = [
    *(
        (("skipless", "sas", "sas-p")[(number + number // 6) % 3], {"position": "rope", **keys})
        for number, keys in enumerate(COMBINATIONS)
    ),
    *((form, {"position": "rope"}) for form in FORMS),
    *(
        (form, {"scores": scores, "query_range": 0.3, "num_key_value_heads": 4})
        for form in ("skipless", "sas", "sas-p")
        for scores in ("coca", "coca-strict", "coca-slack")
    ),
]


@pytest.mark.parametrize(
    ("form", "keys"),
    DECODED,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
@torch.no_grad()
def test_cached_decoding_is_the_full_forward(form, keys):
    model, cache = _form(form, **keys), DynamicCache()
    space.decodes(model)
    model(random_ids(length=15), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert plan(model.config).cache_bytes == 2 * held // (2 * 15)
