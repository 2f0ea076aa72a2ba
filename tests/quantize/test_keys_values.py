"""Keys and values in few bits: against the formulas, and a cache that rounds what is written."""

import pytest
import tests_architectures as architectures
import torch
from transformers import DynamicCache

from clearhead import ClearheadError
from clearhead.ops.hadamard import hadamard
from clearhead.quantize import quantized, scheme
from clearhead.quantize.attention import rounded

from .test_quantizers import fp8_oracle, zeropoint_oracle


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
