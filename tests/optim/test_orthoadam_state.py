"""What OrthoAdam saves, loads and refuses."""

import copy

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam

from .trials import adamw, assert_same, distance, give_gradients, make_parameters, ortho, run

# State --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("share", ["parameter", "size"])
@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_a_saved_state_goes_on_bit_for_bit(way, kind, share):
    unbroken, _ = run(ortho(rotation=kind, share=share), 6)
    parameters, optimizer = run(ortho(rotation=kind, share=share), 3)
    if way == "deepcopy":
        parameters, resumed = copy.deepcopy((parameters, optimizer))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        other = "size" if share == "parameter" else "parameter"
        resumed = ortho(rotation=kind, seed=9, share=other)(parameters.values())
        resumed.load_state_dict(saved)
        assert resumed.param_groups[0]["seed"] == 0
    for step in range(3, 6):
        give_gradients(parameters, step)
        resumed.step()
    assert_same(parameters, unbroken, rtol=0, atol=0)


def test_a_state_saved_without_names_keeps_its_rotations_under_names():
    unbroken, _ = run(ortho(), 6)
    parameters, optimizer = run(ortho(), 3)
    resumed = ortho()(parameters.items())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = ortho()(parameters.items())
    again.load_state_dict(copy.deepcopy(resumed.state_dict()))
    for step in range(3, 6):
        give_gradients(parameters, step)
        again.step()
    assert_same(parameters, unbroken, rtol=0, atol=0)


def test_no_rotation_is_in_the_state():
    parameters, optimizer = run(ortho(rotation="haar"), 1)
    state = optimizer.state_dict()
    assert {key for entry in state["state"].values() for key in entry} == {
        "step",
        "first_moment",
        "second_moment",
    }
    numbers = sum(t.numel() for entry in state["state"].values() for t in entry.values())
    assert numbers == 2 * sum(p.numel() for p in parameters.values()) + len(parameters)
    assert all(not isinstance(v, torch.Tensor) for v in state["param_groups"][0].values())


def test_adamws_state_is_refused_and_ours_by_adamw():
    parameters, theirs = run(adamw, 1)
    optimizer = ortho()(parameters.values())
    with pytest.raises(ClearheadError, match="cannot be rotated"):
        optimizer.load_state_dict(theirs.state_dict())
    disguised = {**theirs.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ClearheadError, match="exp_avg"):
        optimizer.load_state_dict(disguised)
    assert not optimizer.state
    _, ours = run(ortho(), 1)
    theirs.load_state_dict(ours.state_dict())
    give_gradients(parameters, 1)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()


def test_a_changed_shape_is_refused():
    _, optimizer = run(ortho(), 1)
    changed = {**make_parameters(), "wide": nn.Parameter(torch.zeros(6, 12))}
    with pytest.raises(ClearheadError, match=r"shape \[6, 12\] has shape \[6, 10\]"):
        ortho()(changed.values()).load_state_dict(optimizer.state_dict())


# Bad input ----------------------------------------------------------------------------------


def test_parameters_without_a_gradient_are_left_alone():
    parameters = make_parameters()
    optimizer = ortho()(parameters.values())
    optimizer.step()
    give_gradients(parameters, 0)
    parameters["tall"].grad = None
    before = parameters["tall"].detach().clone()
    optimizer.step()
    assert torch.equal(parameters["tall"], before)
    assert parameters["tall"] not in optimizer.state
    assert distance(parameters, run(ortho(), 1)[0], "twin") < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_changes_nothing(value):
    parameters, optimizer = run(ortho(), 2)
    before = copy.deepcopy((list(parameters.values()), optimizer.state_dict()["state"]))
    give_gradients(parameters, 2)
    parameters["twin"].grad[3, 2] = value
    with pytest.raises(
        ClearheadError, match="gradient of parameter 2 of group 0 is not finite, or too"
    ):
        optimizer.step()
    after = list(parameters.values()), optimizer.state_dict()["state"]
    for old, new in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new)
    for index, entry in before[1].items():
        assert all(torch.equal(entry[key], after[1][index][key]) for key in entry)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": torch.zeros(())}, "lr is 0.0"),
        ({"eps": 0}, "eps is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"betas": 0.9}, "betas is 0.9"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"limit": 1}, "limit is 1"),
        ({"share": "name"}, "choose one of parameter, size"),
        ({"rotation": "hadamar"}, "did you mean hadamard"),
        ({"rotation": "none"}, "no parameter has an axis to rotate"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ClearheadError, match=message):
        ortho(**options)(make_parameters().values())


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.bfloat16), "takes float32"),
        (torch.zeros(4, 0), "float32, not empty"),
        (torch.zeros(1, 4), None),
        (torch.zeros(4, 1), "no parameter has an axis to rotate"),
    ],
)
def test_bad_parameters(parameter, message):
    parameter = nn.Parameter(parameter, requires_grad=False)
    if message is None:
        assert OrthoAdam([parameter])._turns[0][0].size == 4
    else:
        with pytest.raises(ClearheadError, match=message):
            OrthoAdam([parameter])
