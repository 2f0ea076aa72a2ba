"""A repair's three numbers are those that `diagnose` and `quantize` measure."""

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.diagnose import diagnose
from clearhead.lab.converting import three_numbers
from clearhead.quantize import Texts, cost, scheme


@pytest.mark.parametrize("name", ["transformer", "differential"])
def test_the_three_numbers_are_those_of_the_other_verbs(name):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ClearheadForCausalLM(preset(name, **shape)).eval()
    windows = list(torch.randint(0, 64, (2, 24)))
    numbers = three_numbers(model, windows)
    measures = {
        (one["metric"], one.get("map")): one["value"]
        for one in diagnose(model, windows, batch_size=1).measures
        if "layer" not in one
    }
    map_name = "difference" if name == "differential" else "softmax"
    assert numbers["sink"] == pytest.approx(measures["first_token_argmax_share", map_name])
    top, median = (measures[f"hidden_{one}", None] for one in ("top_1", "median"))
    assert numbers["largest_state"] == pytest.approx(top / median)
    texts = Texts(windows=windows)
    full, rounded = (cost(model, one, texts).perplexity for one in (None, scheme("w8a8-coarse")))
    assert full
    assert rounded
    assert numbers["eight_bits"] == pytest.approx(rounded / full - 1)
