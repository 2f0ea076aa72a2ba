"""Models on a CUDA device do what they do on a CPU, where they are proved: `make gpu-check`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM

from . import space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACES = space.attentions()
FAR = 1e-4  # of the largest entry: float32 sums in another order, through two layers


def _results(model: Any, device: str, **inputs: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits of shown tokens, loss and every gradient, on the CPU in float64."""
    there = copy.deepcopy(model).to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with torch.no_grad():
        logits = there(**inputs).logits
    loss = there(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in there.parameters()]
    shown = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    found = logits[shown].cpu().double(), loss.detach().cpu().double()
    return *found, [gradient.cpu().double() for gradient in gradients]


@pytest.mark.parametrize(("scores", "position"), PLACES)
def test_every_attention(scores, position):
    """Of whole rows, padded ones, and packed documents."""
    ids = torch.randint(4, 31, (2, 21))
    mask, place = torch.ones_like(ids), torch.arange(21).expand_as(ids)
    mask[0, :7] = 0
    packed = {"position_ids": place % 10, "document_ids": place // 10}
    for point in PLACES[scores, position]:
        model = ClearheadForCausalLM(space.config(**point))
        for extra in ({}, {"attention_mask": mask}, packed):
            got, want = (_results(model, on, input_ids=ids, **extra) for on in ("cuda", "cpu"))
            for found, exact in zip(got[:2], want[:2], strict=True):
                assert (found - exact).abs().max() <= FAR * exact.abs().max().clamp_min(1e-3)
            largest = max(float(gradient.abs().max()) for gradient in want[2])
            for found, exact in zip(got[2], want[2], strict=True):
                assert (found - exact).abs().max() <= FAR * largest
