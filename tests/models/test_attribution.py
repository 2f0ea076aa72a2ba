"""Gradients of the output with respect to the attentions that are returned."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from clearhead import ClearheadForCausalLM, preset
from clearhead.ops import oracles
from clearhead.ops.layouts import repeat

from . import space

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer", {}),
    "softmax1": ("softmax1", {}),
    "sink": ("sink", {}),
    "coca": ("coca", {}),
    "alibi": ("alibi", {}),
    "forget": ("forget", {}),
    "windowed": ("transformer", {"sliding_window": 3}),
    "differential": ("differential", {}),
    "differential without its norm": ("differential", {"head_norm": "none"}),
    "differential-v2": ("differential-v2", {}),
    "sas": ("sas", {}),
    "shaped": ("transformer", {"shaping": "shaped", "num_key_value_heads": 4}),
    "shaped difference": (
        "differential",
        {"shaping": "shaped", "head_norm": "none", "num_key_value_heads": 4},
    ),
}
LAST = 1  # the layer whose matrix is moved
PLACES = ((0, 0, 6, 0), (0, 1, 6, 3), (1, 1, 4, 4), (1, 0, 5, 2))


def _model(name: str) -> Any:
    name, options = MODELS[name]
    model = ClearheadForCausalLM(preset(name, **space.WHOLE | {"num_key_value_heads": 2} | options))
    space.stir(model)
    model.set_attn_implementation("eager")
    return model.eval()


def _slope(attention: Any, head: int) -> float:
    """How far the effective matrix moves where the head's first map does."""
    slope = attention.shaping.beta[head].item() if attention.shaping is not None else 1.0
    without_norm = getattr(attention.maps, "head_norm", None) == "none"
    return slope * (1 - attention.maps.lambda_init) if without_norm else slope


@pytest.mark.parametrize("name", MODELS)
def test_attentions_have_the_gradient_of_the_matrix_that_multiplies_the_values(name: str) -> None:
    model, ids = _model(name).double(), torch.randint(0, 61, (2, 7))
    step, moves = 1e-5, dict[tuple[int, ...], float]()

    def moving(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> Any:
        visibility, scale, sink = (options[key] for key in ("visibility", "scaling", "sink"))
        weights = oracles.weights(q, k, scale=scale, sink=sink, **visibility._asdict())
        first_maps = module.maps.split(torch.arange(q.shape[1])[None])[0][0]
        for (row, head, query, key), by in moves.items() if module.layer.index == LAST else ():
            weights[row, first_maps[head], query, key] += by / _slope(module, head)
        return (weights @ repeat(v, q.shape[1])).transpose(1, 2), None

    def loss(**options: Any) -> tuple[Tensor, Any]:
        out = model(ids, use_cache=False, **options)
        return out.logits.sin().sum(), out.attentions

    total, attentions = loss(output_attentions=True)
    for matrix in attentions:
        matrix.retain_grad()
    total.backward()
    assert all((matrix.grad != 0).any() for matrix in attentions)
    AttentionInterface.register("moving", moving)
    model.set_attn_implementation("moving")
    with torch.no_grad():
        for place in PLACES:
            moves = {place: step}
            above = loss()[0].item()
            moves = {place: -step}
            want = (above - loss()[0].item()) / (2 * step)
            assert attentions[LAST].grad[place].item() == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_returning_attentions_changes_no_output_and_no_gradient(name: str) -> None:
    model, ids = _model(name), torch.randint(0, 61, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0

    def run(**options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache, **options)
        rest = model(ids[:, 8:], attention_mask=mask, past_key_values=cache, **options)
        logits = torch.cat([first.logits, rest.logits], 1)
        logits.sin().sum().backward()
        found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        return logits, found

    plain, gradients = run()
    returned, again = run(output_attentions=True)
    assert torch.equal(plain, returned)
    torch.testing.assert_close(again, gradients, rtol=1e-3, atol=1e-4)
