"""Whole attention maps of a short text, against the models' own."""

import pytest
import torch

from clearhead import ClearheadError
from clearhead.diagnose import attention_maps

T = 13


@pytest.mark.parametrize("name", ["transformer", "softmax1", "Llama", "GPT-2"])
def test_attention_maps(tiny, name):
    model, ids = tiny.make(name), tiny.windows(1, T)[0]
    model.train()
    maps = attention_maps(model, ids)
    assert model.training
    model.eval()
    assert [(m["layer"], m["head"]) for m in maps] == [(i, h) for i in range(3) for h in range(4)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(ids[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for line in maps:
        found = torch.tensor(line["weights"])
        assert torch.allclose(found, matrices[line["layer"]][0, line["head"]], atol=6e-5)
        assert line["map"] == "softmax"
        assert all(round(w, 4) == w for row in line["weights"] for w in row)


def test_differential_attention_maps(tiny):
    model, ids = tiny.make("differential"), tiny.windows(1, T)[0]
    maps = {
        (m["layer"], m["head"], m["map"]): torch.tensor(m["weights"])
        for m in attention_maps(model, ids)
    }
    assert len(maps) == 3 * 2 * 3
    for layer, head in ((0, 0), (2, 1)):
        lam = model.model.layers[layer].self_attn.maps.lambdas().item()
        expected = maps[layer, head, "map 1"] - lam * maps[layer, head, "map 2"]
        assert torch.allclose(maps[layer, head, "difference"], expected, atol=2e-4)
        assert (maps[layer, head, "difference"] < 0).any()


def test_attention_maps_refuse(tiny):
    model = tiny.make("transformer")
    for ids in (torch.zeros(65, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)):
        with pytest.raises(ClearheadError, match="one text of 1 to 64 tokens"):
            attention_maps(model, ids)
