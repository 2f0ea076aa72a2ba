"""Where C x is the tokens' own running mean, shaped attention is one operation."""

import pytest
import torch
from transformers import DynamicCache

from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.models import ClearheadModel
from clearhead.nn.attention import Attention

from . import space

SHAPE = space.SHAPE | {"head_dim": 4}


def _model(cls=ClearheadForCausalLM, name="sas", **keys):
    if keys.get("maps") == "differential":
        keys["head_norm"] = "none"
    torch.manual_seed(0)
    model = cls(preset(name, **SHAPE | keys))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


@pytest.fixture
def calls(monkeypatch):
    """The lengths of the texts that `ops.shaped_causal` has been asked for."""
    lengths, plain = [], ops.shaped_causal
    monkeypatch.setattr(
        ops, "shaped_causal", lambda x, *rest: lengths.append(x.shape[1]) or plain(x, *rest)
    )
    return lengths


@pytest.mark.parametrize("name", ["skipless", "sas", "sas-p"])
def test_whole_rows_take_it(name, calls):
    model = _model(name=name, shaping="shaped")
    ids = torch.randint(0, 31, (2, 9))
    model(ids, use_cache=False)
    model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    model(ids, past_key_values=DynamicCache())  # a prompt is whole rows too
    assert calls == [9] * 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["sas", "sas-p"])
def test_it_is_what_the_centre_made_apart_gives(name, monkeypatch):
    """In float64, with every gradient."""
    model, ids = _model(ClearheadModel, name).double(), torch.randint(0, 31, (2, 37))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run():
        out = model(ids, use_cache=False).last_hidden_state
        return [out, *torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)]

    got = run()
    monkeypatch.setattr(Attention, "_runs", lambda self, part, visibility: False)
    for a, b in zip(got, run(), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())
