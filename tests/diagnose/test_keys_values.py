"""The largest keys and values, by layer and part of the text, and where they are."""

import pytest
import torch

from clearhead.diagnose import diagnose

from .kinds import VOCABULARY, make


def _lines(model, ids):
    found = diagnose(model, list(ids), batch_size=2).measures
    return [line for line in found if line["metric"] in ("largest_key", "largest_value")]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "softmax1"])
def test_against_a_cache(name):
    """Keys and values as the model's own cache has them."""
    model, ids = make(name), torch.randint(2, VOCABULARY, (3, 17))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    lines = {(x["metric"], x["tokens"], x["layer"]): x for x in _lines(model, ids) if "layer" in x}
    assert len(lines) == 4 * len(cache.layers)
    for layer, kept in enumerate(cache.layers):
        for metric, x in (("largest_key", kept.keys), ("largest_value", kept.values)):
            for tokens, part, first in (("first", x[:, :, :1], 0), ("rest", x[:, :, 1:], 1)):
                line = lines[metric, tokens, layer]
                assert line["value"] == pytest.approx(part.abs().max().item(), rel=1e-5)
                top = part.abs().amax(0).transpose(0, 1)
                token, head, channel = (top > top.max() * 0.9999).nonzero()[0].tolist()
                assert line["where"] == f"head {head}, channel {channel}, token {token + first}"


def test_the_whole_names_the_layer():
    lines = _lines(make("Llama"), torch.randint(2, VOCABULARY, (2, 9)))
    of_rest = [x for x in lines if (x["metric"], x["tokens"]) == ("largest_key", "rest")]
    whole, *layers = of_rest
    top = max(layers, key=lambda x: x["value"])
    assert whole["value"] == top["value"]
    assert whole["where"] == f"layer {top['layer']}, {top['where']}"


def test_a_prefix_is_kept_apart_and_alibis_columns_do_not_count(tiny):
    model = tiny.make("key-value")
    for name, parameter in model.named_parameters():
        if "normalizer" in name:
            torch.nn.init.normal_(parameter, std=50)
    lines = _lines(model, torch.randint(2, VOCABULARY, (2, 9)))
    values = {(x["metric"], x["tokens"]): x["value"] for x in lines if x.get("layer") == 0}
    parts = ("first", "rest", "prefix")
    assert set(values) == {(f"largest_{kind}", part) for kind in ("key", "value") for part in parts}
    assert values["largest_key", "prefix"] > 3 * values["largest_key", "rest"]
    lines = _lines(
        tiny.make("alibi", initializer_range=0.02), torch.randint(2, VOCABULARY, (1, 40))
    )
    assert max(x["value"] for x in lines if x["metric"] == "largest_key") < 10
