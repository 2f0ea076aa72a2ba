"""Whole models: packed documents, what is returned, how weights and the simplified blocks start."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, preset
from clearhead.models import PRESETS, ClearheadModel, plan

from . import space


def _model(name: str, **keys: object) -> Any:
    return space.stirred(space.build(name, **keys), 0.1)


_ids = space.drawing(13, 61)


DOCUMENTS = torch.tensor([[0] * 6 + [1] * 7])
RESTARTING = torch.tensor([[*range(6), *range(7)]])
# All of these say that a row holds a text of 6 and one of 7 tokens.
PACKINGS = {
    "documents": {"document_ids": DOCUMENTS},
    "documents and positions": {"document_ids": DOCUMENTS, "position_ids": RESTARTING},
    "positions": {"position_ids": RESTARTING},
    "positions and a mask": {"position_ids": RESTARTING, "attention_mask": DOCUMENTS * 0 + 1},
}


@pytest.mark.parametrize("name", PRESETS)
def test_packed_documents_are_texts_of_their_own_however_they_are_told(name):
    """The same bits in every form, also before padding, and each document as alone."""
    model, first, second = _model(name), _ids(1, 6), _ids(1, 7)
    ids = torch.cat([first, second], 1)
    alone = torch.cat([model(first).logits, model(second).logits], 1)

    def run(inputs: dict[str, Any]) -> list[Tensor]:
        model.zero_grad()
        logits = model(**inputs).logits[:, :13]
        assert torch.allclose(logits, alone, atol=2e-5)
        logits.square().mean().backward()
        return [logits, *(p.grad.clone() for p in model.parameters())]

    padded = [
        {key: pad(x, (0, 3)) for key, x in {"attention_mask": DOCUMENTS * 0 + 1, **form}.items()}
        for form in PACKINGS.values()
    ]
    for row, forms in ((ids, [*PACKINGS.values()]), (pad(ids, (0, 3)), padded)):
        wanted = run({"input_ids": row} | forms[0])
        for form in forms[1:]:
            assert all(map(torch.equal, run({"input_ids": row} | form), wanted)), form


@torch.no_grad()
def test_a_row_of_documents_may_be_longer_than_any_text():
    model, ids = _model("gpt2", max_position_embeddings=8), _ids(1, 15)
    documents = torch.tensor([[0] * 8 + [1] * 7])
    wanted = torch.cat([model(part).logits for part in ids.split([8, 7], 1)], 1)
    assert torch.allclose(model(ids, document_ids=documents).logits, wanted, atol=2e-5)
    with pytest.raises(ClearheadError, match="position_ids has 9, outside"):
        model(ids, document_ids=torch.tensor([[0] * 10 + [1] * 5]))


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_learns_from_where_it_starts(name):
    """In three steps: what starts at 0 keeps others from moving, as a gain W_Q, and that W_K."""
    model, ids = space.build(name).train(), _ids()
    optimizer, moved = torch.optim.AdamW(model.parameters()), set()
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        moved |= {name for name, p in model.named_parameters() if p.grad.any()}
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    still = {name for name, _ in model.named_parameters()} - moved
    assert not [name for name in still if not name.endswith("k_proj.bias")]  # softmax hides it


def test_attentions_are_of_eager_alone_and_the_last_state_is_what_the_head_reads():
    model, ids = _model("transformer"), _ids()
    with pytest.raises(ClearheadError, match="attn_implementation='eager'"):
        model(ids, output_attentions=True)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[-1] @ model.lm_head.weight.T, out.logits)


def test_initialisation_is_the_stated_policy():
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset("differential", "tiny"))
    spread = {name: p.std().item() for name, p in model.named_parameters() if p.numel() > 1}
    for name, p in model.named_parameters():
        if "lambda" in name:
            continue
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert abs(spread[name] / (0.02 / 8**0.5) - 1) < 0.03, name
        else:
            assert abs(spread[name] / 0.02 - 1) < 0.03, name
    lambdas = torch.cat([p for name, p in model.named_parameters() if "lambda" in name])
    assert abs(lambdas.std() / 0.1 - 1) < 0.15
    inits = [layer.self_attn.maps.lambda_init for layer in model.model.layers]
    assert inits == pytest.approx([0.2, 0.3555, 0.4707, 0.5561], abs=1e-4)
    gpt2 = ClearheadForCausalLM(preset("gpt2", "tiny"))
    assert all((p == 0).all() for name, p in gpt2.named_parameters() if name.endswith("bias"))


NARROW = space.SHAPE | {"head_dim": 4}
# Every attention that C is defined for.
COMBINATIONS = [
    {"normalizer": normalizer, "maps": maps, "num_key_value_heads": groups}
    for normalizer in ("softmax", "softmax1", "sink")
    for maps, groups in zip(("single", "differential", "differential-v2"), (2, 4, 2), strict=True)
]


def make_config(name: str, **keys: object) -> ClearheadConfig:
    if keys.get("maps") == "differential":
        keys["head_norm"] = "none"
    return preset(name, **NARROW | keys)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("keys", COMBINATIONS, ids=lambda keys: "-".join(map(str, keys.values())))
@torch.no_grad()
def test_the_sub_block_starts_as_the_identity(keys, direction):
    """In float32, to the rounding of two ways to the same mean; with trained λ and sinks too."""
    model, passed = ClearheadModel(make_config("sas", direction=direction, **keys)).eval(), []
    for name, p in model.named_parameters():
        if "lambda" in name or "logit" in name:
            p += torch.randn_like(p)
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda m, args, out: passed.append((args[0], out)))
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[0, :5] = 0
    for masks in ({}, {"attention_mask": mask}, {"document_ids": mask.cumsum(1) // 9}):
        model(space.ids(length=23), use_cache=False, **masks)
    assert len(passed) == 6
    assert all((out - x).abs().max() < 2e-5 for x, out in passed)


@pytest.mark.parametrize("name", ["skipless", "sas", "sas-p", "sas-p-nonorm"])
def test_the_first_step_s_gradients(name):
    """W_Q moves, W_K cannot yet, and what β gets γ gives (the notes on arXiv 2311.01906)."""
    model = ClearheadForCausalLM(make_config(name)).double()
    ids = space.ids()
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
    ids = space.ids()
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
    model, ids = ClearheadForCausalLM(make_config("sas", mlp_skip_gain=1.0)).eval(), space.ids()
    assert model.model.layers[0].mlp_skip_gain.gain.item() == 1.0
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(ids).logits, plain(ids).logits)
