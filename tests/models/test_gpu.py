"""Models on a CUDA device do what they do on a CPU, where they are proved: `make gpu-check`."""

import copy

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM

from . import space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACES = sorted({(point["scores"], point["position"]) for point in space.attentions()})
FAR = 1e-4  # of the largest entry: float32 sums in another order, through two layers


def _close(got: Tensor, want: Tensor, bound: float = FAR) -> None:
    error = (got.detach().cpu().double() - want.detach().cpu().double()).abs().max()
    assert error <= bound * want.abs().max().clamp_min(1e-3)


def _like_the_cpu(model: ClearheadForCausalLM, ids: Tensor) -> None:
    """Logits, loss and every gradient; whole rows, padded ones, and packed documents."""
    device = copy.deepcopy(model).cuda()
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    place, half = torch.arange(ids.shape[1]).expand_as(ids), ids.shape[1] // 2
    packed = {"position_ids": place % half, "document_ids": place // half}
    for extra in ({}, {"attention_mask": mask}, packed):
        there = {key: value.cuda() for key, value in extra.items()}
        with torch.no_grad():
            logits = [
                m(input_ids=i, **e).logits.cpu()
                for m, i, e in ((device, ids.cuda(), there), (model, ids, extra))
            ]
        seen = mask.bool() if "attention_mask" in extra else slice(None)
        _close(logits[0][seen], logits[1][seen])
        want = model(input_ids=ids, labels=ids, **extra)
        got = device(input_ids=ids.cuda(), labels=ids.cuda(), **there)
        _close(got.loss, want.loss)
        pairs = zip(device.parameters(), model.parameters(), strict=True)
        wants = torch.autograd.grad(want.loss, [p for _, p in pairs], allow_unused=True)
        gots = torch.autograd.grad(got.loss, list(device.parameters()), allow_unused=True)
        largest = max(float(g.abs().max()) for g in wants if g is not None)
        for a, b in zip(gots, wants, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.cpu() - b).abs().max() <= FAR * largest


@pytest.mark.parametrize(("scores", "position"), PLACES)
def test_every_attention(scores, position):
    for point in space.attentions():
        if (point["scores"], point["position"]) == (scores, position):
            model = ClearheadForCausalLM(space.config(**point))
            _like_the_cpu(model, torch.randint(4, 31, (2, 21)))
