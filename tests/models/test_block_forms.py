"""The forms of the simplified blocks: by the papers' equations, in caches, in checkpoints."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from clearhead import ClearheadForCausalLM
from clearhead.models import plan

from .blocks import BLOCKS, COMBINATIONS, make_config, random_ids, stirred


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
    assert torch.allclose(got, want, atol=1e-9 * want.abs().max().item())
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(y.square().mean(), parameters) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-8 * b.abs().max().item())


DECODED = [
    *(
        (form, {"position": "rope", **keys})
        for form in ("skipless", "sas", "sas-p")
        for keys in COMBINATIONS
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
    """By steps and chunks, after a crop, with padding on the left, in either cache."""
    model = _form(form, **keys)
    ids = random_ids()
    whole = model(ids, use_cache=False).logits

    def close(got: Tensor, want: Tensor) -> bool:
        return bool((got - want).abs().max() / want.abs().max() < 1e-5)

    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        parts = [model(p, past_key_values=cache).logits for p in ids.split([5, 3, 1, 1, 1], 1)]
        assert close(torch.cat(parts, 1), whole)
    cache = DynamicCache()
    model(torch.cat([ids[:, :6], random_ids(length=3)], 1), past_key_values=cache)
    cache.crop(-3)
    assert close(model(ids[:, 6:], past_key_values=cache).logits, whole[:, 6:])
    padded = torch.cat([random_ids(length=4), ids], 1)
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
