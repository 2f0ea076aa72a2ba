"""Models whose up projections have rows of one size: the same function in other weights."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadError, ClearheadForCausalLM
from clearhead.models.equalised import equalised

from . import space

TURNED: dict[str, Any] = {"mlp_rotation": "hadamard"}
MODELS: dict[str, dict[str, Any]] = {
    "swiglu": TURNED,
    "geglu": {**TURNED, "mlp": "geglu"},
    "biases": {**TURNED, "bias": True},
    "parallel": {**TURNED, "order": "parallel"},
    "by layer": {**TURNED, "layer_overrides": [{}, {"mlp": "geglu"}]},
}


def _model(**keys: Any) -> ClearheadForCausalLM:
    model = space.uneven(**keys)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] *= 20
    return model


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_rows_of_one_size_are_the_same_function(keys):
    model = _model(**keys)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = equalised(model)
    torch.testing.assert_close(space.logits(made), space.logits(model), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for old, new in zip(model.model.layers, made.model.layers, strict=True):
        sizes, were = (one.mlp.up_proj.weight.abs().amax(1) for one in (new, old))
        torch.testing.assert_close(sizes, were.median().expand_as(sizes))
        assert were.max() > 1.2 * were.median()


@pytest.mark.parametrize("zeros", [1, 40, None], ids=["one", "most", "all"])
def test_rows_of_zeros_stay_zeros_and_the_bias_of_hardly_any_weight_finite(zeros):
    """Such a row is enlarged a thousandfold at most, and its bias with it."""
    model = _model(**TURNED, bias=True)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[:zeros] = 0
        model.model.layers[0].mlp.up_proj.weight[2] *= 1e-30
    made = equalised(model)
    assert not made.model.layers[1].mlp.up_proj.weight[:zeros].any()
    biases = [one.model.layers[0].mlp.up_proj.bias[2] for one in (made, model)]
    torch.testing.assert_close(biases[0], 1000 * biases[1])
    torch.testing.assert_close(space.logits(made), space.logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mlp": "gelu"}, r"mlp='gelu' has a function .* swiglu or geglu"),
        ({}, "which only a rotation evens out: give --rotate down too"),
    ],
    ids=["no gate", "no rotation"],
)
def test_what_cannot_be_made_equal_is_refused(keys, message):
    with pytest.raises(ClearheadError, match=message):
        equalised(_model(**keys))
