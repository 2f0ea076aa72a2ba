"""Attention on quantised logits against a dense transcription in float64."""

import itertools

import pytest
import tests_architectures as architectures
import torch

from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility
from clearhead.probe import attention_call as tiles
from clearhead.probe.attention_call import AttentionCall
from clearhead.quantize import attention
from clearhead.quantize.schemes import Rounding


def _dense(call: AttentionCall, v: torch.Tensor, how: Rounding) -> torch.Tensor:
    """Whole maps at once: quantise what is seen, softmax beside the sink, weigh the values."""
    q, k, v = (x.double() for x in (call.q, call.k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * call.scale
    mask = call.visibility.key_mask
    seen = oracles.visible(*scores.shape[2:], causal=call.causal, key_mask=mask)
    shared = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[how.scale]
    top, levels = (scores * seen).abs().amax(shared, keepdim=True), 2 ** (how.bits - 1) - 1
    exp = ((scores / top * levels).round() / levels * top).exp() * seen
    null = 0.0 if call.sink is None else torch.as_tensor(call.sink).double().exp()
    return exp / (exp.sum(-1, keepdim=True) + null) @ v


@pytest.mark.parametrize("rows", [128, 3])
@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize("scale", ["tensor", "head", "row"])
@pytest.mark.parametrize("size", [0.3, 8.0])
def test_against_dense_attention(monkeypatch, rows, sink, scale, size):
    monkeypatch.setattr(tiles, "ROWS", rows)  # tiles smaller than the map, too
    q, k = torch.randn(2, 4, 7, 6) * size, torch.randn(2, 2, 9, 6)
    v = torch.randn(2, 2, 9, 5)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :2] = False
    common = {"q": q.double(), "k": k.double(), "module": torch.nn.Identity(), "layer": 0}
    common["sink"] = None if sink is None else torch.tensor(sink)
    for bits, causal in itertools.product((2, 4, 8), (True, False)):
        visibility = Visibility(causal, key_mask=padding)
        call = AttentionCall(scale=0.4, visibility=visibility, **common)
        how = Rounding(bits=bits, scale=scale)
        found = attention.attended(call, v.double(), how)
        torch.testing.assert_close(found, _dense(call, v, how), rtol=1e-9, atol=1e-9)


def test_a_query_that_sees_nothing_gets_zeros():
    q, k = torch.randn(2, 1, 1, 3, 4)
    visibility = Visibility(key_mask=torch.tensor([[False, True, True]]))
    common = {"module": torch.nn.Identity(), "layer": 0, "scale": 1.0}
    call = AttentionCall(q=q, k=k, visibility=visibility, **common)
    found = attention.attended(call, torch.randn(1, 1, 3, 4), Rounding(bits=4, scale="row"))
    assert torch.equal(found[0, 0, 0], torch.zeros(4))
    assert bool(found.isfinite().all())


def test_differential_quantises_both_maps(monkeypatch):
    """In one call a layer, all first maps before all second: each map's heads have scales."""
    heads, original = [], attention.attended

    def watch(call: AttentionCall, v: torch.Tensor, how: Rounding) -> torch.Tensor:
        heads.append(call.q.shape[1])
        return original(call, v, how)

    monkeypatch.setattr(attention, "attended", watch)
    model, how = architectures.make("differential"), Rounding(bits=4, scale="head")
    with torch.no_grad(), attention.attention(model, how):
        model(torch.randint(0, architectures.VOCABULARY, (1, 9)))
    assert heads == [4, 4]
