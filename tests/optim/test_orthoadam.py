import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam, orthoadam, rotations
from clearhead.optim.rotations import dense, haar, make_rotation, random_signs, sign_key

from .trials import (
    OPTIONS,
    SHAPES,
    adamw,
    assert_same,
    distance,
    give_gradients,
    make_parameters,
    ortho,
    run,
)

# What it is ---------------------------------------------------------------------------------


def test_without_rotation_it_is_adamw_over_100_steps():
    ours, _ = run(ortho(rotation="identity"), 100)
    theirs, _ = run(adamw, 100)
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_signed_permutation_is_adam_which_is_why_there_is_none(monkeypatch):
    def permutation(size, generator):
        order = torch.randperm(size, generator=generator)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        return dense(torch.eye(size)[order] * signs)

    monkeypatch.setitem(rotations.KINDS, "shuffled", permutation)
    ours, _ = run(ortho(rotation="shuffled"), 20)
    theirs, _ = run(adamw, 20)
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_a_rotation_differs_from_adam_after_one_step_in_matrices_only(kind):
    ours, _ = run(ortho(rotation=kind), 1)
    theirs, _ = run(adamw, 1)
    for name in ("wide", "tall", "experts"):
        assert distance(ours, theirs, name) > 1e-3
    for name in ("gain", "scale"):
        assert distance(ours, theirs, name) < 1e-6


def dense_q(kind, share, name):
    """The Q of one parameter, written out."""
    size = SHAPES[name][-1]
    q = make_rotation(kind, seed=0, size=size).apply(torch.eye(size)).mT.double()
    if share == "size":
        return q
    signs = random_signs([sign_key(0, name, -1)], size, torch.device("cpu"))
    return q @ torch.diag(signs[0].double())


@pytest.mark.parametrize("share", ["parameter", "size"])
@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_it_is_algorithm_1_with_a_dense_q_for_every_matrix(kind, share):
    """The paper's lines in float64."""
    parameters = make_parameters()
    optimizer = OrthoAdam(parameters.items(), **OPTIONS, rotation=kind, share=share)
    for step in range(7):
        give_gradients(parameters, step)
        optimizer.step()
    (beta1, beta2), rate = OPTIONS["betas"], OPTIONS["lr"]
    matrices = {}
    for name in ("wide", "tall", "twin", "experts"):
        q = matrices[name] = dense_q(kind, share, name)
        torch.testing.assert_close(q @ q.mT, torch.eye(len(q)).double(), atol=1e-6, rtol=0)
        reference = make_parameters()
        theta = reference[name].detach().double()
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for step in range(7):
            give_gradients(reference, step)
            g = reference[name].grad.double() @ q.mT
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            s = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + 1e-8)
            theta = theta - rate * 0.1 * theta - rate * s @ q
        torch.testing.assert_close(parameters[name].double(), theta, rtol=1e-5, atol=1e-6)
    assert torch.equal(matrices["tall"], matrices["twin"]) == (share == "size")


def test_one_rotation_a_size_is_what_it_was_before_parameters_had_their_own():
    """Committed records were made by it: these are the numbers of the code of 2026-11-20."""
    parameters, _ = run(ortho(share="size"))
    for name, first in {
        "wide": [-1.497959, -0.814634, -0.642466],
        "tall": [0.382672, 0.435329, 0.230187],
        "twin": [0.740011, -0.424998, -0.119166],
        "experts": [1.233573, 1.248297, 0.3805],
    }.items():
        assert parameters[name].flatten()[:3].tolist() == pytest.approx(first, abs=2e-6)


def test_it_is_equivariant(monkeypatch):
    """Turn the data, the weights that read them and Q, and the trajectory is the turned one."""
    turn = haar(12, torch.Generator().manual_seed(5))

    def turned(size, generator):
        q = haar(size, generator)
        return dense((q @ turn.mT if size == 12 else q).float())

    monkeypatch.setitem(rotations.KINDS, "turned", turned)
    data, wanted = torch.randn(40, 12).double(), torch.randn(40, 3)

    def train(kind, data, turn):
        generator = torch.Generator().manual_seed(2)
        first, second = (
            torch.randn(shape, generator=generator, dtype=torch.float64) / 3
            for shape in ((9, 12), (3, 9))
        )
        weights = [nn.Parameter((first @ turn.mT).float()), nn.Parameter(second.float())]
        optimizer = OrthoAdam(weights, **OPTIONS, rotation=kind, share="size")
        for _ in range(50):
            loss = ((data.float() @ weights[0].mT).tanh() @ weights[1].mT - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [weight.detach() for weight in weights]

    plain = train("haar", data, torch.eye(12).double())
    rotated = train("turned", data @ turn.mT, turn)
    torch.testing.assert_close(rotated[0], plain[0] @ turn.mT.float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rotated[1], plain[1], rtol=0, atol=1e-4)
    assert (train("haar", data @ turn.mT, turn)[1] - plain[1]).abs().max() > 0.02


# How it is done -----------------------------------------------------------------------------


def test_equal_shapes_together_are_the_same_as_one_by_one(monkeypatch):
    together, _ = run(ortho())
    monkeypatch.setitem(orthoadam.CHUNK, "cpu", 1)
    alone, _ = run(ortho())
    assert_same(together, alone)


def test_a_rotation_of_ones_own_is_drawn_by_name_or_else_by_place():
    parameters = make_parameters()
    own = OrthoAdam(parameters.items(), **OPTIONS)
    wrapped = {f"module._orig_mod.{name}": p for name, p in make_parameters().items()}
    again = OrthoAdam(wrapped.items(), **OPTIONS)
    for optimizer, named in ((own, parameters), (again, wrapped)):
        give_gradients(named, 0)
        optimizer.step()
    assert_same(parameters, {name.split(".")[-1]: p for name, p in wrapped.items()}, rtol=0, atol=0)
    by_place, _ = run(ortho(), 1)
    assert distance(by_place, parameters, "wide") > 1e-3


def test_equal_gradients_of_two_parameters_step_alike_only_where_rotations_are_shared():
    def change(share):
        parameters = {name: nn.Parameter(torch.zeros(10, 16)) for name in ("a", "b")}
        optimizer = OrthoAdam(parameters.items(), lr=0.1, share=share)
        for parameter in parameters.values():
            parameter.grad = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        return distance({"x": parameters["a"]}, {"x": parameters["b"]}, "x")

    assert change("size") == 0
    assert change("parameter") > 0.05


def test_axes_beyond_the_limit_are_left_as_they_are():
    shapes = (4, 8), (1, 4), (4, 1)
    optimizer = OrthoAdam([nn.Parameter(torch.zeros(shape)) for shape in shapes], limit=7)
    assert [turn is not None for turn in optimizer._turns[0]] == [False, True, False]
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


def test_a_closure_and_a_rate_in_a_tensor():
    parameters = make_parameters()
    optimizer = OrthoAdam(parameters.values(), **{**OPTIONS, "lr": torch.tensor(0.01)})

    def closure():
        give_gradients(parameters, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert_same(parameters, run(ortho(), 1)[0])
