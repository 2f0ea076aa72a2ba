"""Rivals of the papers here, whole models against a transcription of their formulas in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM, preset
from clearhead.models import plan
from clearhead.models.conversion import converted
from clearhead.models.families.family import merged
from clearhead.models.rotated import rotated
from clearhead.models.starts import started
from clearhead.optim import build_optimizer
from clearhead.quantize import linear_layers
from clearhead.train.config import TrainConfig
from tests.ops.agreement import agree

from .space import WHOLE

RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "osp": ("osp", {}),
    "osp, untied": ("osp", {"tie_word_embeddings": False}),
    "gated-headwise": ("gated-headwise", {}),
    "lambda 0.8": ("differential", {"lambda_init": 0.8}),
}
CLOSE = 1e-5  # angles and λ are float32
IDS = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))


def _model(rival: str, **keys: Any) -> ClearheadForCausalLM:
    """In float64, none of its numbers where its paper starts it."""
    torch.manual_seed(0)
    name, own = RIVALS[rival]
    model = ClearheadForCausalLM(preset(name, **WHOLE | own | keys)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def _normed(x: Tensor, gain: Tensor | float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def _turned(x_BTHD: Tensor) -> Tensor:
    length, width = x_BTHD.shape[1], x_BTHD.shape[-1]
    rates = 10_000.0 ** -(torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones(1).double(), torch.arange(length).double()[:, None] * rates)
    pairs = torch.complex(*(half.contiguous() for half in x_BTHD.chunk(2, -1))) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


def _maps(q_BTHD: Tensor, k_BTHD: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / q_BTHD.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _loss(
    rival: str, weights: dict[str, Tensor], heads: int = 4, layers: int = 2
) -> tuple[Tensor, Tensor]:
    """The mean loss of the next token, and logits, from the papers' formulas."""
    table = weights["model.embed_tokens.weight"]
    x = table[IDS]
    if rival.startswith("osp"):
        x = x @ weights["model.project_in.weight"].T
    for index in range(layers):
        own = {
            name.removeprefix(f"model.layers.{index}."): weight for name, weight in weights.items()
        }
        h = _normed(x, own["input_layernorm.weight"])
        q, k, v = (
            (h @ own[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (heads, -1))
            for part in "qkv"
        )
        maps = _maps(_turned(q), _turned(k))
        if rival == "lambda 0.8":
            q1, k1, q2, k2 = (
                own[f"self_attn.maps.lambda_{part}"] for part in ["q1", "k1", "q2", "k2"]
            )
            lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + 0.8
            v = v.flatten(2).unflatten(-1, (heads // 2, -1))
            o = torch.einsum("bhts,bshd->bthd", maps[:, 0::2] - lam * maps[:, 1::2], v)
            o = (1 - 0.8) * _normed(o, own["self_attn.maps.norm_weight"])
        else:
            o = torch.einsum("bhts,bshd->bthd", maps, v)
        if rival == "gated-headwise":
            o = o / (1 + torch.exp(-(h @ own["self_attn.epilogue.gate_proj.weight"].T)))[..., None]
        x = x + o.flatten(2) @ own["self_attn.o_proj.weight"].T
        h = _normed(x, own["post_attention_layernorm.weight"])
        gate, wide = (h @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * wide) @ own["mlp.down_proj.weight"].T
    x = _normed(x, weights["model.norm.weight"])
    if rival.startswith("osp"):
        x = x @ weights["model.project_out.weight"].T
    logits = x @ weights.get("lm_head.weight", table).T
    picked = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])
    return -picked.mean(), logits


@pytest.mark.parametrize("rival", RIVALS)
def test_logits_and_all_gradients_are_those_of_the_formulas(rival):
    """Compiled models are compared with these in test_compiled.py."""
    model = _model(rival)
    out, (loss, logits) = model(IDS, labels=IDS), _loss(rival, dict(model.named_parameters()))
    assert (out.logits - logits).abs().max() < CLOSE * logits.abs().max()
    assert abs(out.loss - loss) < CLOSE
    agree(out.loss, loss, list(model.parameters()), bound=CLOSE, least=1e-9)


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
    for rival, keys in (("osp", {}), ("osp, untied", {"norm": "rmsnorm"})):
        model = _model(rival, **keys)
        wanted = model(IDS).logits
        turned = rotated(model, ("residual", "values"))
        for one in (merged(model), turned):
            tied = one.config.tie_word_embeddings
            assert one.config.embedding_projection is tied is (one is turned and rival == "osp")
            assert (one(IDS).logits - wanted).abs().max() < 1e-10 * wanted.abs().max()
            # Few bits leave the projections alone, as they do the embedding and the head.
            assert linear_layers(one).keys() == linear_layers(model).keys()
    llama = converted(model.float())
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert (llama(IDS).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
def test_a_trained_model_gets_projections_as_the_same_function():
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset("transformer", **WHOLE)).eval()
    start = started(model, {"embedding_projection": True})
    assert torch.allclose(start.model(IDS).logits, model(IDS).logits, atol=1e-5)
    assert start.new == ("model.project_in.weight", "model.project_out.weight")
