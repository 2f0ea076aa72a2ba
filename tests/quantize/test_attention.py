"""Attention on quantised logits against a dense transcription in float64."""

import itertools

import pytest
import tests_architectures as architectures
import torch
from transformers import DynamicCache

from clearhead import ClearheadError
from clearhead.ops import oracles
from clearhead.ops.hadamard import hadamard
from clearhead.ops.visibility import Visibility
from clearhead.probe import attention_call as tiles
from clearhead.probe.attention_call import AttentionCall
from clearhead.quantize import attention, quantized, scheme
from clearhead.quantize.attention import rounded
from clearhead.quantize.schemes import Rounding

from .test_quantizers import fp8_oracle, zeropoint_oracle


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


def _oracle(x_BGSD, name, keys):
    """Each group of numbers that shares a scale, one after the other, in float64."""
    how = scheme(name).keys_values
    out = x_BGSD.clone()
    width = x_BGSD.shape[3]
    turn = hadamard(width).double() / width**0.5 if how.rotated else torch.eye(width).double()

    def write(view, row):
        new = fp8_oracle(row) if how.quantizer == "fp8" else zeropoint_oracle(row, how.bits)
        view.copy_(torch.tensor(new, dtype=torch.float64).view(view.shape))

    for text in out:
        rest = text[:, how.keep :] @ turn
        if how.scale == "tensor":
            write(rest, rest.flatten().tolist())
        for head in rest if how.scale != "tensor" else ():
            by_channel = how.scale == "channel" and keys
            for row in head.T if by_channel else head:
                write(row, row.tolist())
        text[:, how.keep :] = rest @ turn.T
    return out


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        *("kv4", "kv8-tensor", "kv3-channel", "kv-fp8", "kv-fp8-channel", "kv4-keep2"),
        *("kv4-channel-keep1", "hadamard-kv4", "hadamard-kv-fp8-channel-keep3"),
    ],
)
def test_against_the_formula(name, keys):
    x = torch.randn(2, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] *= 30
    found = rounded(x, scheme(name).keys_values, keys=keys)
    torch.testing.assert_close(found, _oracle(x, name, keys), rtol=1e-9, atol=1e-9)


def test_a_text_no_longer_than_what_is_kept():
    x = torch.randn(1, 2, 3, 8)
    assert torch.equal(rounded(x, scheme("kv2-keep3").keys_values, keys=True), x)


class _RoundingCache(DynamicCache):
    """Keeps keys and values as they are once rounded."""

    def __init__(self, name):
        super().__init__()
        self.how = scheme(name).keys_values

    def update(self, k, v, layer, *args, **kwargs):
        k, v = (rounded(x, self.how, keys=keys) for x, keys in ((k, True), (v, False)))
        return super().update(k, v, layer, *args, **kwargs)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT-2", "gpt-oss", "transformer"])
def test_against_a_cache_that_rounds_what_is_written(name, implementation):
    model = architectures.make(name)
    if (name, implementation) != ("gpt-oss", "sdpa"):  # which it refuses
        model.set_attn_implementation(implementation)
    ids = torch.randint(0, architectures.VOCABULARY, (1, 9))
    with torch.no_grad():
        expected = model(ids, past_key_values=_RoundingCache("kv3"), use_cache=True).logits
        with quantized(model, scheme("kv3")) as called:
            found = model(ids).logits
            step = model(ids[:, :6], use_cache=True)
            last = model(ids[:, 6:], past_key_values=step.past_key_values, use_cache=True).logits
        plain = model(ids).logits
    assert len(called.attention) == model.config.num_hidden_layers
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(last, expected[:, 6:], rtol=1e-4, atol=1e-5)
    assert (found - plain).norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "coca", "alibi"])
def test_keys_before_rope(name):
    """`k_proj`'s output is rounded, and nothing of the keys afterwards."""
    model = architectures.make(name)
    ids = torch.randint(0, architectures.VOCABULARY, (1, 9))
    how = scheme("kv3-prerope").keys_values
    attention = next(m for m in model.modules() if hasattr(m, "k_proj"))
    seen = []
    shape = (1, 9, getattr(attention, "groups", 2), -1)
    with torch.no_grad(), quantized(model, scheme("kv3-prerope")):
        attention.k_proj.register_forward_hook(lambda m, x, y: seen.append((x[0], y)))
        model(ids)
        (x, found), *_ = seen
        exact = torch.nn.functional.linear(x, attention.k_proj.weight, attention.k_proj.bias)
    found, exact = (x.view(shape).transpose(1, 2) for x in (found, exact))
    torch.testing.assert_close(found, rounded(exact, how, keys=True))


def test_what_cannot_be_rounded_is_named():
    model = architectures.make("GPT-2")
    with pytest.raises(ClearheadError, match="no k_proj"), quantized(model, scheme("kv4-prerope")):
        pass
    model = architectures.make("Llama")
    model.model.layers[1].self_attn.v_proj.weight.data.fill_(torch.nan)
    named = pytest.raises(ClearheadError, match=r"values of model.layers.1.self_attn: .* NaN")
    with torch.no_grad(), quantized(model, scheme("kv8")), named:
        model(torch.arange(3)[None])
