"""A repair's three numbers are those that `diagnose` and `quantize` measure."""

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.diagnose import diagnose
from clearhead.lab.converting import in_three_lines, three_numbers
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


def test_the_lines_say_before_and_after_and_what_has_no_number():
    before = {"sink": 0.881, "largest_state": 24165.0, "eight_bits": 1.129}
    after = {"sink": 0.02, "largest_state": 31.0, "eight_bits": None}
    assert in_three_lines(before, after, "1,024 tokens of books") == [
        "sink: 88.1% → 2.0% of queries look most at the first token (1,024 tokens of books)",
        "largest state: 24,165 → 31 times the median hidden state (1,024 tokens of books)",
        "8 bits: +112.9% → not measured perplexity with w8a8-coarse (1,024 tokens of books)",
    ]
