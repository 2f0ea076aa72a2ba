"""The simplified blocks: what they are at the start, by hand, in caches, in checkpoints."""

import subprocess
import sys

import pytest
import tests_models_space as space
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from clearhead import ClearheadConfig, ClearheadForCausalLM, ops, preset
from clearhead.models import ClearheadModel, plan
from clearhead.nn import Block, initialise
from clearhead.nn.protocols import QueryGroup
from clearhead.ops.visibility import Visibility
from clearhead.optim import decay_groups

SHAPE = space.SHAPE | {"head_dim": 4}
BLOCKS = ["parallel", "skipless", "sas", "sas-p", "sas-p-nonorm"]
SHAPED = [name for name in BLOCKS if name != "parallel"]
# Every attention that C is defined for, at a kind of scores and positions each.
COMBINATIONS = [
    {"normalizer": normalizer, "maps": maps, "num_key_value_heads": groups}
    for normalizer in ("softmax", "softmax1", "sink")
    for maps in ("single", "differential", "differential-v2")
    for groups in (4, 2)
]


def _config(name: str, **keys: object) -> ClearheadConfig:
    if keys.get("maps") == "differential":
        keys["head_norm"] = "none"
    return preset(name, **SHAPE | keys)


def _stirred(model: nn.Module) -> nn.Module:
    """Every number that starts as a constant, moved away from it."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model.eval()


def _ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 31, (batch, length))


def _attention(config: ClearheadConfig, index: int = 1) -> nn.Module:
    block = Block(config.layer(index))
    block.apply(lambda module: initialise(module, 0.02))
    return block.self_attn


def _attend(module, q, k, v, *, visibility, lambdas, rows, **options):
    return ops.attend(q, k, v, **visibility._asdict(), **options)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("keys", COMBINATIONS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_sub_block_starts_as_the_identity(keys, direction):
    """In float32, to the rounding of two ways to the same mean; with trained λ and sinks too."""
    attention = _attention(
        _config(
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
        got = attention(x, query_groups=(QueryGroup(),), attend=_attend, visibility=visibility)
        assert (got - x).abs().max() < 2e-6


@pytest.mark.parametrize("keys", COMBINATIONS, ids=lambda keys: "-".join(map(str, keys.values())))
@torch.no_grad()
def test_with_alibi_the_sub_block_starts_as_the_identity_too(keys):
    """C is then the mean that fades with distance: as attention at W_Q = 0 does."""
    model = ClearheadModel(_config("sas", position="alibi", **keys))
    seen: dict[str, Tensor] = {}
    attention = model.layers[1].self_attn
    for name, p in attention.named_parameters():
        if "lambda" in name or "logit" in name:
            p += torch.randn_like(p)
    attention.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[0, :5] = 0
    documents = torch.arange(23).expand(2, -1) // 9
    for masks in ({}, {"attention_mask": mask}, {"document_ids": documents}):
        model(_ids(length=23), use_cache=False, **masks)
        shown = masks.get("attention_mask", torch.ones(2, 23)).bool()
        assert (seen["out"] - seen["x"])[shown].abs().max() < 2e-5  # ALiBi's columns are rounded


@pytest.mark.parametrize("name", SHAPED)
def test_the_first_step_s_gradients(name):
    """W_Q moves, W_K cannot yet, and what β gets γ gives (the notes on arXiv 2311.01906)."""
    model = ClearheadForCausalLM(_config(name)).double()
    ids = _ids()
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
    model = ClearheadForCausalLM(_config("skipless", shaping="skipinit"))
    ids = _ids()
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
    if hasattr(shaping, "identity"):
        return shaping.identity * own + (1 - shaping.identity) * weights
    return weights


def _dense(model: ClearheadForCausalLM, ids: Tensor, slopes: list[float]) -> Tensor:
    """The paper's equations 1 to 8 with T × T matrices, for 4 heads of width 4."""
    config = model.config
    x, length = model.model.embed_tokens(ids), ids.shape[1]
    at = torch.arange(length, dtype=x.dtype)
    hidden = torch.ones(length, length).triu(1).bool()
    for layer in model.model.layers:
        attention, z = layer.self_attn, _norm(x, layer.input_layernorm)
        value = _product(z, attention.v_proj)
        heads = []
        for h in range(4):
            rows = slice(4 * h, 4 * h + 4)
            q, k = (z @ p.weight[rows].T for p in (attention.q_proj, attention.k_proj))
            bias = (-slopes[h] * (at[:, None] - at)).masked_fill(hidden, -torch.inf)
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
    "annealed": ("skipless", {"shaping": "annealed", "attention_skip": "identity"}),
    "pre-ln-reparametrised": ("transformer", REPARAMETRISED | {"value_init": "orthogonal"}),
    "sas-reparametrised": ("sas", REPARAMETRISED | {"first_values": None}),
}


def _form(form: str, **keys: object) -> ClearheadForCausalLM:
    """With every number stirred, and an annealed identity a quarter of the way."""
    name, changes = FORMS[form]
    model = _stirred(ClearheadForCausalLM(_config(name, **changes | keys)))
    for module in model.modules():
        if hasattr(module, "on_step_end"):
            module.on_step_end(0.25, 3.0)
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("position", "slopes"), [("none", [0.0] * 4), ("alibi", [0.25, 0.0625, 2**-6, 2**-8])]
)
def test_the_paper_s_equations_in_float64(form, position, slopes):
    model = _form(form, position=position, num_key_value_heads=4).double()
    ids = _ids()
    got, want = model(ids, use_cache=False).logits, _dense(model, ids, slopes)
    assert torch.allclose(got, want, atol=1e-9 * want.abs().max().item())
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(y.square().mean(), parameters) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-8 * b.abs().max().item())


DECODED = [
    *(
        (form, {"position": position, **keys})
        for form, position in (
            ("skipless", "rope"),
            ("sas", "rope"),
            ("sas-p", "rope"),
            ("sas", "alibi"),
        )
        for keys in COMBINATIONS
    ),
    *((form, {"position": "rope"}) for form in FORMS),
    *(
        (form, {"scores": scores, "query_range": 0.3, "num_key_value_heads": 4})
        for form in ("skipless", "sas", "sas-p")
        for scores in ("collinear", "collinear-strict", "collinear-slack")
    ),
]


@pytest.mark.parametrize(
    ("form", "keys"),
    DECODED,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
@torch.no_grad()
def test_cached_decoding_is_the_full_forward(form, keys):
    """By steps and chunks, after a crop, with padding on the left, in either cache."""
    model = _form(form, **keys)
    ids = _ids()
    whole = model(ids, use_cache=False).logits

    def close(got: Tensor, want: Tensor) -> bool:
        return bool((got - want).abs().max() / want.abs().max() < 1e-5)

    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        parts = [model(p, past_key_values=cache).logits for p in ids.split([5, 3, 1, 1, 1], 1)]
        assert close(torch.cat(parts, 1), whole)
    cache = DynamicCache()
    model(torch.cat([ids[:, :6], _ids(length=3)], 1), past_key_values=cache)
    cache.crop(-3)
    assert close(model(ids[:, 6:], past_key_values=cache).logits, whole[:, 6:])
    padded = torch.cat([_ids(length=4), ids], 1)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[:, :4] = 0
    cache = DynamicCache()
    rows = []
    for start, stop in ((0, 9), (9, 13), (13, 14), (14, 15)):
        part = padded[:, start:stop]
        out = model(part, attention_mask=mask[:, :stop], past_key_values=cache)
        rows.append(out.logits)
    assert close(torch.cat(rows, 1)[:, 4:], whole)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert plan(model.config).cache_bytes == 2 * held // (2 * 15)


@torch.no_grad()
def test_the_value_cache_is_the_normed_input():
    model = _stirred(ClearheadForCausalLM(_config("sas-p")))
    seen = {}
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda m, args, out: seen.update(z=args[0]))
    cache = DynamicCache()
    model(_ids(), past_key_values=cache)
    assert torch.equal(cache.layers[1].values.transpose(1, 2).flatten(2), seen["z"])


@pytest.mark.parametrize(
    ("direction", "position"),
    [("causal", "rope"), ("causal", "alibi"), ("bidirectional", "rope")],
)
@pytest.mark.parametrize("keys", COMBINATIONS[::2], ids=lambda k: "-".join(map(str, k.values())))
@torch.no_grad()
def test_output_attentions_are_the_shaped_matrix(keys, direction, position):
    keys = {"position": position, "direction": direction, **keys}
    model = _stirred(ClearheadModel(_config("sas-p", **keys)))
    ids = _ids()
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


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_at_the_start_the_shaped_matrix_is_the_identity(position):
    model = ClearheadModel(_config("sas", position=position)).eval()
    model.set_attn_implementation("eager")
    for matrix in model(_ids(), output_attentions=True).attentions:
        assert torch.allclose(matrix, torch.eye(11).expand_as(matrix), atol=1e-6)


@pytest.mark.parametrize(
    "form", ["sas", "sas-p-nonorm", "skipless", "annealed", "pre-ln-reparametrised"]
)
def test_a_clean_process_loads_the_same_bits(form, tmp_path):
    """Matrices that are drawn once and never trained come from the checkpoint, not from a seed."""
    model = _form(form)
    model.save_pretrained(tmp_path)
    ids = _ids()
    torch.save(ids, tmp_path / "ids.pt")
    code = (
        "import sys, torch, clearhead; torch.set_num_threads(1); torch.manual_seed(99);"
        "m = clearhead.ClearheadForCausalLM.from_pretrained(sys.argv[1]).eval();"
        "ids = torch.load(sys.argv[1] + '/ids.pt');"
        "torch.save(m(ids).logits.detach(), sys.argv[1] + '/logits.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)


@pytest.mark.parametrize("name", BLOCKS)
def test_gains_do_not_decay(name):
    model = ClearheadForCausalLM(_config(name, mlp_gain=0.1, value_init=None))
    decaying = {id(p) for p in decay_groups(model, 0.1)[0]["params"]}
    gains = [
        p for key, p in model.named_parameters() if key.endswith(("gain", "alpha", "beta", "gamma"))
    ]
    assert gains
    assert not any(id(p) in decaying for p in gains)
    assert all(id(p) in decaying for key, p in model.named_parameters() if key.endswith("delta"))


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


def test_no_norm_keeps_the_first_layer_s_and_the_last():
    model = ClearheadForCausalLM(_config("sas-p-nonorm")).model
    kinds = [type(layer.input_layernorm).__name__ for layer in model.layers]
    assert kinds == ["LayerNorm", "Identity"]
    assert type(model.norm).__name__ == "LayerNorm"


def test_only_the_first_layer_has_values_of_its_own():
    model = ClearheadForCausalLM(_config("sas")).model
    kinds = [type(layer.self_attn.v_proj).__name__ for layer in model.layers]
    assert kinds == ["Reparametrised", "Identity"]
    assert not [name for name, _ in model.named_parameters() if "o_proj" in name]


def test_a_learned_gain_of_the_skip_is_the_released_code_s():
    model = ClearheadForCausalLM(_config("sas", mlp_skip_gain=1.0))
    assert model.model.layers[0].mlp_skip_gain.gain.item() == 1.0
    ids = _ids()
    plain = ClearheadForCausalLM(_config("sas"))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)


def test_collinear_scores_shaped_from_a_stated_start():
    config = _config("sas", scores="collinear", query_range=0.3)
    model = ClearheadForCausalLM(config)
    assert (model.model.layers[0].self_attn.q_proj.weight != 0).all()
    ids = _ids()
    model(ids, labels=ids).loss.backward()
    assert (model.model.layers[0].self_attn.q_proj.weight.grad != 0).any()


def test_languini_has_alibi_as_the_paper_s_runs():
    for name in ("transformer", "parallel", "sas", "sas-p"):
        config = preset(name, "languini")
        assert (config.position, config.mlp) == ("alibi", "gelu")
        assert (config.num_hidden_layers, config.max_position_embeddings) == (12, 512)
    assert preset("coca", "languini").position == "rope"


@pytest.mark.parametrize(
    ("name", "position"), [("sas", "rope"), ("sas-p", "rope"), ("sas", "alibi")]
)
def test_compiled_without_a_graph_break(name, position):
    torch._dynamo.reset()
    config = _config(name, position=position, num_key_value_heads=4)
    model = ClearheadForCausalLM(config).train()
    _stirred(model).train()
    ids = _ids(length=20)
    parameters = list(model.parameters())
    eager = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    compiled = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    for a, b in zip(compiled, eager, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * b.abs().max().item())
