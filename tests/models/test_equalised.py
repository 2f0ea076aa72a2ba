"""Models whose up projections have rows of one size: the same function in other weights."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
from clearhead.models.equalised import equalised

from . import space

MODELS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu": {"mlp": "geglu"},
    "biases": {"bias": True},
    "turned": {"mlp_rotation": "hadamard"},
    "parallel": {"order": "parallel"},
}


def _model(**keys: Any) -> ClearheadForCausalLM:
    torch.manual_seed(0)
    model = ClearheadForCausalLM(ClearheadConfig(**space.SHAPE | keys)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        model.model.layers[0].mlp.up_proj.weight[3] *= 20
    return model


def _logits(model: ClearheadForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(22).view(2, 11)).logits


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_rows_of_one_size_are_the_same_function(keys):
    model = _model(**keys)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = equalised(model)
    torch.testing.assert_close(_logits(made), _logits(model), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for old, new in zip(model.model.layers, made.model.layers, strict=True):
        sizes, were = (one.mlp.up_proj.weight.abs().amax(1) for one in (new, old))
        torch.testing.assert_close(sizes, were.median().expand_as(sizes))
        assert were.max() > 1.2 * were.median()


def test_a_row_of_zeros_stays_one():
    model = _model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2] = 0
    made = equalised(model)
    assert not made.model.layers[1].mlp.up_proj.weight[2].any()
    torch.testing.assert_close(_logits(made), _logits(model), rtol=1e-9, atol=1e-9)


def test_an_mlp_without_a_gate_is_refused():
    with pytest.raises(ClearheadError, match=r"mlp='gelu' has a function .* swiglu or geglu"):
        equalised(_model(mlp="gelu"))
