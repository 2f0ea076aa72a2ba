"""β over α of trained values and projections, against the numbers in the state dict."""

import pytest
import torch

from clearhead.diagnose import diagnose
from clearhead.diagnose.diagnosis import gain_ratios

from .kinds import ENCODERS, make

BOTH = {"values": "reparametrised", "projections": "reparametrised", "value_gain": 0.2}
# {layer: (α, β) of the values, (α, β) of the projections}
GAINS = {0: ((2.0, -1.0), (1.0, 0.25)), 1: ((-4.0, 0.5), (0.5, 0.5)), 2: ((1.0, 0.0), (-1.0, -3.0))}


def _set(model, gains) -> None:
    state = {name.removeprefix("model."): one for name, one in model.state_dict().items()}
    for layer, pairs in gains.items():
        for part, (alpha, beta) in zip(("v_proj", "o_proj"), pairs, strict=True):
            state[f"layers.{layer}.self_attn.{part}.alpha"].fill_(alpha)
            state[f"layers.{layer}.self_attn.{part}.beta"].fill_(beta)


@pytest.mark.parametrize("preset", ["sas", "transformer", ENCODERS[1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(tiny, preset, dtype):
    model = tiny.ours(preset, **BOTH, num_key_value_heads=4).to(dtype)
    _set(model, GAINS)
    lines = gain_ratios(model)
    of_values = [tiny.value(lines, "beta_over_alpha_values", layer=n) for n in range(3)]
    of_projections = [tiny.value(lines, "beta_over_alpha_projections", layer=n) for n in range(3)]
    assert of_values == [0.5, 0.125, 0.0]
    assert of_projections == [0.25, 1.0, 3.0]
    # All but the first layer's values.
    assert tiny.value(lines, "beta_over_alpha") == (0.125 + 0.0 + 0.25 + 1.0 + 3.0) / 5
    assert len(lines) == 7


def test_a_diagnosis_has_them_beside_its_other_measures(tiny):
    model = tiny.ours("sas", **BOTH)
    _set(model, GAINS)
    found = diagnose(model, tiny.windows(), batch_size=3).measures
    assert tiny.value(found, "beta_over_alpha_values", layer=1) == 0.125
    assert tiny.value(found, "similarity", layer=2) is not None


def test_other_models_have_no_such_number_and_sas_only_the_first_layers_values(tiny):
    (line,) = gain_ratios(tiny.ours("sas"))
    assert line == {"metric": "beta_over_alpha_values", "layer": 0, "value": 1.0}
    for name in ("transformer", "skipless", "Llama", "Mamba", "BERT"):
        assert gain_ratios(make(name)) == []
