"""PoPE and softpick in whole models: a layer from its formula, all gradients, caches, probes."""

import math

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadConfig, ClearheadForCausalLM
from clearhead.nn.normalizers import Softpick
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import agree

from . import space

POPE = {"scores": "pope"}
SOFTPICK = {"normalizer": "softpick"}
LENGTH = 11
MASKS = {
    "plain": {},
    "padded": {"attention_mask": torch.tensor([[1] * 11, [0] * 4 + [1] * 7])},
    "packed": {"document_ids": torch.tensor([[0] * 4 + [1] * 7] * 2)},
}


def _model(logits: float = 1.0, **keys: object) -> ClearheadForCausalLM:
    """In float64; queries and keys times `logits`, phases and gains away from their starts."""
    model = space.uneven(**keys)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p *= logits
            if name.endswith("phase_bias"):
                p.uniform_(-2 * math.pi - 1, 1)  # beyond both ends in places
    return model


_ids = space.ids


def _layer(model: ClearheadForCausalLM, kind: str) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The last layer's input and output for one call, and its queries, keys and values."""
    attention = model.model.layers[1].self_attn
    seen: dict[str, Tensor] = {}
    hook = attention.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    model(_ids(), use_cache=False, **MASKS[kind])
    hook.remove()
    x = seen["x"]
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return x, seen["out"], tuple(p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in projections)


def _visible(kind: str, window: int | None = None) -> Tensor:
    mask, documents = (MASKS[kind].get(key) for key in ("attention_mask", "document_ids"))
    mask = None if mask is None else mask.bool()
    options = {"causal": True, "window": window, "key_mask": mask, "segments": documents}
    return oracles.visible(LENGTH, LENGTH, **options)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("logits", [0.01, 1.0, 20.0])
def test_pope_and_all_its_gradients_are_the_formula_s(logits, groups, kind):
    """To the rounding of float32 phases."""
    model = _model(logits, num_key_value_heads=groups, **POPE)
    attention = model.model.layers[1].self_attn
    x, out, (q, k, v) = _layer(model, kind)
    delta = attention.scores.phase_bias.clamp(-2 * math.pi, 0)
    at = torch.arange(LENGTH).expand(2, -1)
    if kind == "padded":
        at = (MASKS[kind]["attention_mask"].cumsum(1) - 1).clamp_min(0)
    if kind == "packed":
        at = torch.tensor([[*range(4), *range(7)]] * 2)
    scores = oracles.pope_scores(q, k, delta, at, at, 10_000.0) * 8**-0.5
    seen = _visible(kind)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    v = v.repeat_interleave(4 // groups, 1)
    want = attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
    shown = seen.any(-1)[:, 0].expand(2, -1)[..., None]
    agree(out, want, (x, *attention.parameters()), bound=1e-5 * max(1.0, logits), shown=shown)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("logits", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("window", [None, 3])
def test_softpick_and_all_its_gradients_are_the_formula_s(logits, groups, kind, window):
    """The operation; a model's eager form is by the oracle too, as the next but one compares."""
    q, k, v = (torch.randn(2, n, LENGTH, 8, dtype=torch.float64) for n in (4, groups, groups))
    q, k, v = (x.requires_grad_() for x in (q * logits, k, v))
    mask, documents = (MASKS[kind].get(key) for key in ("attention_mask", "document_ids"))
    visibility = Visibility(True, window, None if mask is None else mask.bool(), documents)
    got = Softpick.attend(q, k, v, visibility=visibility, scale=8**-0.5)
    scores = q @ k.repeat_interleave(4 // groups, 1).mT * 8**-0.5
    term = torch.where(_visible(kind, window), scores.exp() - 1, 0)
    weights = term.relu() / term.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    agree(got, weights @ v.repeat_interleave(4 // groups, 1), (q, k, v), bound=1e-9, least=1.0)


@pytest.mark.parametrize("size", [1e-6, 1e3, 1e5])
def test_softpick_of_low_and_high_logits_is_finite(size):
    """In float32, over more rows than one tile; the weights' ratio at low ones is the scores'."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 131, 4, requires_grad=True) for _ in range(3))
    out = Softpick.attend(q * size, k, v, visibility=Visibility(), scale=1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    exact = (q.double() * size) @ k.double().mT
    seen = torch.ones(131, 131).tril().bool()
    term = torch.where(seen, exact, 0)
    if size < 1:
        want = term.relu() / term.abs().sum(-1, keepdim=True) @ v.double()
        assert torch.allclose(out.double(), want, atol=1e-4)
    nothing = (term <= 0).all(-1)
    assert nothing.any()
    assert not out[nothing].any()


def test_pope_starts_without_phases_of_its_own_and_caches_keys_as_projected():
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | POPE)).eval()
    for layer in model.model.layers:
        assert not layer.self_attn.scores.phase_bias.any()
    cache = model(_ids()).past_key_values
    assert cache.layers[0].keys.shape[-1] == 8
