"""The simplified blocks: what they are at the start, their matrices, counts and options."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from clearhead import ClearheadConfig, ClearheadForCausalLM, preset
from clearhead.models import ClearheadModel, plan
from clearhead.nn import block_of, initialise
from clearhead.nn.bases import PositionTables
from clearhead.ops.visibility import Visibility
from clearhead.optim import decay_groups

from .blocks import BLOCKS, COMBINATIONS, make_config, random_ids, stirred

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


@torch.no_grad()
def test_the_value_cache_is_the_normed_input():
    model = stirred(ClearheadForCausalLM(make_config("sas-p")))
    seen = {}
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda m, args, out: seen.update(z=args[0]))
    cache = DynamicCache()
    model(random_ids(), past_key_values=cache)
    assert torch.equal(cache.layers[1].values.transpose(1, 2).flatten(2), seen["z"])


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


def test_at_the_start_the_shaped_matrix_is_the_identity():
    model = ClearheadModel(make_config("sas")).eval()
    model.set_attn_implementation("eager")
    for matrix in model(random_ids(), output_attentions=True).attentions:
        assert torch.allclose(matrix, torch.eye(11).expand_as(matrix), atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_gains_do_not_decay(name):
    model = ClearheadForCausalLM(make_config(name, mlp_gain=0.1, value_init=None))
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
    model = ClearheadForCausalLM(make_config("sas-p-nonorm")).model
    kinds = [type(layer.input_layernorm).__name__ for layer in model.layers]
    assert kinds == ["LayerNorm", "Identity"]
    assert type(model.norm).__name__ == "LayerNorm"


def test_only_the_first_layer_has_values_of_its_own():
    model = ClearheadForCausalLM(make_config("sas")).model
    kinds = [type(layer.self_attn.v_proj).__name__ for layer in model.layers]
    assert kinds == ["Reparametrised", "Identity"]
    assert not [name for name, _ in model.named_parameters() if "o_proj" in name]


def test_a_learned_gain_of_the_skip_is_the_released_code_s():
    model = ClearheadForCausalLM(make_config("sas", mlp_skip_gain=1.0))
    assert model.model.layers[0].mlp_skip_gain.gain.item() == 1.0
    ids = random_ids()
    plain = ClearheadForCausalLM(make_config("sas"))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)


def test_collinear_scores_shaped_from_a_stated_start():
    config = make_config("sas", scores="coca", query_range=0.3)
    model = ClearheadForCausalLM(config)
    assert (model.model.layers[0].self_attn.q_proj.weight != 0).all()
    ids = random_ids()
    model(ids, labels=ids).loss.backward()
    assert (model.model.layers[0].self_attn.q_proj.weight.grad != 0).any()
