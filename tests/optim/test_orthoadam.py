import copy

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam, rotations, update
from clearhead.optim.rotations import Dense, haar

SHAPES = {"wide": (6, 10), "tall": (10, 6), "twin": (10, 6), "experts": (2, 4, 6), "gain": (6,)}
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    return {**named, "scale": nn.Parameter(torch.ones((), dtype=dtype))}


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(make, steps=5, parameters=None, first=0):
    parameters = parameters or make_parameters()
    optimizer = make(parameters.values())
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


def ortho(**options):
    return lambda parameters: OrthoAdam(parameters, **{**OPTIONS, **options})


def adamw(parameters):
    return torch.optim.AdamW(parameters, **OPTIONS, foreach=False)


def assert_same(ours, theirs, **tolerance):
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def distance(ours, theirs, name):
    return float((ours[name] - theirs[name]).detach().abs().max())


# What it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_without_rotation_it_is_adamw_over_100_steps(sides):
    ours, _ = run(ortho(rotation="identity", sides=sides), 100)
    theirs, _ = run(adamw, 100)
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_signed_permutation_is_adam_which_is_why_it_is_refused(monkeypatch):
    def permutation(size, generator):
        order = torch.randperm(size, generator=generator)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        return Dense(torch.eye(size)[order] * signs)

    monkeypatch.setitem(rotations.KINDS, "shuffled", permutation)
    with pytest.raises(ClearheadError, match="exactly Adam"):
        run(ortho(rotation="shuffled"))
    monkeypatch.setitem(rotations.KINDS, "identity", permutation)  # the one that is not checked
    ours, _ = run(ortho(rotation="identity"), 20)
    theirs, _ = run(adamw, 20)
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_a_rotation_differs_from_adam_after_one_step_in_matrices_only(kind, sides):
    ours, _ = run(ortho(rotation=kind, sides=sides), 1)
    theirs, _ = run(adamw, 1)
    for name in ("wide", "tall", "experts"):
        assert distance(ours, theirs, name) > 1e-3
    for name in ("gain", "scale"):
        assert distance(ours, theirs, name) < 1e-6


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_it_is_algorithm_1(kind):
    """The paper's lines, for one matrix, in float64."""
    shape = (6, 10)
    parameters, optimizer = run(ortho(rotation=kind, sides="both"), 7)
    left, right = (
        optimizer._rotations[draw, "cpu"].apply(torch.eye(draw.size), -2).double()
        for draw in (optimizer._axes[0][0][1].draw, optimizer._axes[0][0][0].draw)
    )
    reference = make_parameters()
    theta = reference["wide"].detach().double()
    m, v = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    (beta1, beta2), rate = OPTIONS["betas"], OPTIONS["lr"]
    for step in range(7):
        give_gradients(reference, step)
        g = left @ reference["wide"].grad.double() @ right.mT
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        s = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + 1e-8)
        theta = theta - rate * 0.1 * theta - rate * left.mT @ s @ right
    torch.testing.assert_close(parameters["wide"].double(), theta, rtol=1e-5, atol=1e-6)


def test_it_is_equivariant(monkeypatch):
    """Turn the data, the weights that read them and Q, and the trajectory is the turned one."""
    turn = haar(12, torch.Generator().manual_seed(5))

    def turned(size, generator):
        q = haar(size, generator)
        return Dense((q @ turn.mT if size == 12 else q).float())

    monkeypatch.setitem(rotations.KINDS, "turned", turned)
    data, wanted = torch.randn(40, 12).double(), torch.randn(40, 3).double()

    def train(kind, data, turn):
        generator = torch.Generator().manual_seed(2)
        first, second = (
            torch.randn(shape, generator=generator, dtype=torch.float64) / 3
            for shape in ((9, 12), (3, 9))
        )
        weights = [nn.Parameter(first @ turn.mT), nn.Parameter(second)]
        optimizer = OrthoAdam(weights, **OPTIONS, rotation=kind)
        for _ in range(50):
            loss = ((data @ weights[0].mT).tanh() @ weights[1].mT - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [weight.detach() for weight in weights]

    plain = train("haar", data, torch.eye(12).double())
    rotated = train("turned", data @ turn.mT, turn)
    torch.testing.assert_close(rotated[0], plain[0] @ turn.mT, rtol=0, atol=1e-4)
    torch.testing.assert_close(rotated[1], plain[1], rtol=0, atol=1e-4)
    assert (train("haar", data @ turn.mT, turn)[1] - plain[1]).abs().max() > 0.02


# How it is done -----------------------------------------------------------------------------


def test_equal_shapes_together_are_the_same_as_one_by_one(monkeypatch):
    together, _ = run(ortho())
    monkeypatch.setitem(update.CHUNK, "cpu", 1)
    alone, _ = run(ortho())
    assert_same(together, alone)


def test_rotations_are_shared_by_size_or_drawn_by_name():
    _, shared = run(ortho(sides="both"))
    assert {draw.size for draw, _ in shared._rotations} == {4, 6, 10}
    assert len(shared._rotations) == 3
    parameters = make_parameters()
    own = OrthoAdam(parameters.items(), **OPTIONS, sides="both", share="parameter")
    assert len(own._rotations) == 8  # two axes of four matrices
    wrapped = {f"module._orig_mod.{name}": p for name, p in make_parameters().items()}
    again = OrthoAdam(wrapped.items(), **OPTIONS, sides="both", share="parameter")
    for optimizer, named in ((own, parameters), (again, wrapped)):
        give_gradients(named, 0)
        optimizer.step()
    assert_same(parameters, {name.split(".")[-1]: p for name, p in wrapped.items()}, rtol=0, atol=0)
    with pytest.raises(ClearheadError, match="named_parameters"):
        OrthoAdam(make_parameters().values(), share="parameter")


def test_what_rotations_hold_beyond_adamws_state():
    shapes = [(512, 512)] * 8 + [(1408, 512), (512, 1408)] * 2 + [(4096, 512)]
    parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    numbers = sum(p.numel() for p in parameters)
    assert OrthoAdam(parameters).rotation_numel() < 0.01 * numbers
    small = OrthoAdam(parameters, rotation="haar", limit=512)
    assert small.rotation_numel() == 512**2  # once, whoever shares it


def test_the_limit_and_sides_leave_axes_as_they_are():
    optimizer = OrthoAdam(
        [nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(1, 4))], sides="both", limit=7
    )
    assert [[axis.dim for axis in axes] for axes in optimizer._axes[0]] == [[-2], [-1]]
    with pytest.raises(ClearheadError, match="no parameter has an axis to rotate"):
        OrthoAdam([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(9, 8))], limit=7)


def test_a_group_can_be_plain_adamw():
    parameters = make_parameters()
    first, *rest = parameters.values()
    groups = [{"params": [first]}, {"params": rest, "rotation": "none", "lr": 0.02}]
    optimizer = OrthoAdam(groups, **OPTIONS)
    reference = make_parameters()
    theirs = torch.optim.AdamW(list(reference.values())[1:], **{**OPTIONS, "lr": 0.02})
    for step in range(3):
        for named, o in ((parameters, optimizer), (reference, theirs)):
            give_gradients(named, step)
            o.step()
    for name in list(parameters)[1:]:
        torch.testing.assert_close(parameters[name], reference[name])
    assert distance(parameters, reference, "wide") > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moments_are_float32_whatever_the_parameters_are(dtype):
    parameters, optimizer = run(ortho(), 3, make_parameters(dtype))
    for state in optimizer.state.values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    exact, _ = run(ortho(), 3)
    for name, parameter in parameters.items():
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.float(), exact[name], rtol=0.03, atol=0.03)
    fresh = ortho()(make_parameters(dtype).values())
    fresh.load_state_dict(optimizer.state_dict())
    for loaded, saved in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_a_closure_and_a_rate_in_a_tensor():
    parameters = make_parameters()
    optimizer = OrthoAdam(parameters.values(), **{**OPTIONS, "lr": torch.tensor(0.01)})

    def closure():
        give_gradients(parameters, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert_same(parameters, run(ortho(), 1)[0])


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_torch_compile_captures_a_whole_step(kind):
    parameters = make_parameters()
    optimizer = ortho(rotation=kind)(parameters.values())
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda: optimizer.step(), backend=backend, fullgraph=True)
    for step in range(4):
        give_gradients(parameters, step)
        compiled()
    assert_same(parameters, run(ortho(rotation=kind), 4)[0])
    assert len(graphs) <= 2


# State --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_a_saved_state_goes_on_bit_for_bit(way, kind):
    unbroken, _ = run(ortho(rotation=kind), 6)
    parameters, optimizer = run(ortho(rotation=kind), 3)
    if way == "deepcopy":
        parameters, resumed = copy.deepcopy((parameters, optimizer))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = ortho(rotation=kind, seed=9)(parameters.values())
        resumed.load_state_dict(saved)
        assert resumed.param_groups[0]["seed"] == 0
    for step in range(3, 6):
        give_gradients(parameters, step)
        resumed.step()
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
    with pytest.raises(ClearheadError, match="cannot be turned into another basis"):
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
    with pytest.raises(ClearheadError, match="gradient of parameter 2 of group 0 is not finite"):
        optimizer.step()
    after = list(parameters.values()), optimizer.state_dict()["state"]
    for old, new in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new)
    for index, entry in before[1].items():
        assert all(torch.equal(entry[key], after[1][index][key]) for key in entry)


def test_a_gradient_too_large_to_sum_is_not_called_infinite():
    parameters, optimizer = run(ortho(), 1)
    give_gradients(parameters, 2)
    parameters["twin"].grad[0, :2] = 3e38
    with pytest.raises(ClearheadError, match=r"2 of group 0 is too large .* \(up to 3.0e\+38\)"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = OrthoAdam(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ClearheadError, match="gradient of weight is sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": torch.zeros(())}, "lr is tensor"),
        ({"eps": 0}, "eps is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"betas": 0.9}, "betas is 0.9"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"limit": 1}, "limit is 1"),
        ({"sides": "lef"}, "did you mean left"),
        ({"share": "name"}, "choose one of parameter, size"),
        ({"rotation": "hadamar"}, "did you mean hadamard"),
        ({"rotation": "signs"}, "exactly Adam"),
        ({"rotation": "none"}, "no parameter has an axis to rotate"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ClearheadError, match=message):
        ortho(**options)(make_parameters().values())


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.complex64), "real floats only"),
        (torch.zeros(4, 4, dtype=torch.int64), "real floats only"),
        (torch.zeros(4, 0), "nothing to train"),
        (torch.zeros(1, 4), None),
        (torch.zeros(4, 1), "no parameter has an axis to rotate"),
    ],
)
def test_bad_parameters(parameter, message):
    parameter = nn.Parameter(parameter, requires_grad=False)
    if message is None:
        optimizer = OrthoAdam([parameter], sides="both")
        assert [axis.dim for axis in optimizer._axes[0][0]] == [-1]
    else:
        with pytest.raises(ClearheadError, match=message):
            OrthoAdam([parameter])


def test_a_bad_group_added_later_leaves_no_trace():
    optimizer = ortho()(make_parameters().values())
    with pytest.raises(ClearheadError, match="lr is -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], "lr": -1})
    assert len(optimizer.param_groups) == len(optimizer._axes) == 1
