"""OrthoAdam beside AdamW: what it is, how it is done, and what it saves, loads and refuses."""

import copy

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam, orthoadam
from clearhead.optim.rotations import haar, make_rotation, plain_name, random_signs, sign_key

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


def go_on(parameters, optimizer, steps):
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def run(make, steps=5):
    parameters = make_parameters()
    optimizer = make(parameters.values())
    go_on(parameters, optimizer, range(steps))
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
def test_it_is_algorithm_1_with_a_dense_q_for_every_matrix(kind, share, monkeypatch):
    """The paper's lines in float64."""
    parameters = make_parameters()
    options = OPTIONS | {"rotation": kind, "share": share}
    go_on(parameters, OrthoAdam(parameters.items(), **options), range(7))
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
    monkeypatch.setitem(orthoadam.CHUNK, "cpu", 1)  # one by one, and not equal shapes together
    alone = make_parameters()
    go_on(alone, OrthoAdam(alone.items(), **options), range(7))
    assert_same(parameters, alone)


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


def test_a_rotation_of_ones_own_is_drawn_by_name_or_else_by_place():
    parameters = make_parameters()
    own = OrthoAdam(parameters.items(), **OPTIONS)
    wrapped = {f"module._orig_mod.{name}": p for name, p in make_parameters().items()}
    again = OrthoAdam(wrapped.items(), **OPTIONS)
    for optimizer, named in ((own, parameters), (again, wrapped)):
        go_on(named, optimizer, [0])
    assert_same(parameters, {name.split(".")[-1]: p for name, p in wrapped.items()}, rtol=0, atol=0)
    by_place, _ = run(ortho(), 1)
    assert distance(by_place, parameters, "wide") > 1e-3


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
    go_on(parameters, optimizer, range(3))
    go_on(reference, theirs, range(3))
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
    go_on(parameters, resumed, range(3, 6))
    assert_same(parameters, unbroken, rtol=0, atol=0)


def test_a_state_saved_without_names_keeps_its_rotations_under_names():
    unbroken, _ = run(ortho(), 6)
    parameters, optimizer = run(ortho(), 3)
    resumed = ortho()(parameters.items())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = ortho()(parameters.items())
    again.load_state_dict(copy.deepcopy(resumed.state_dict()))
    go_on(parameters, again, range(3, 6))
    assert_same(parameters, unbroken, rtol=0, atol=0)


def test_no_rotation_is_in_the_state():
    parameters, optimizer = run(ortho(rotation="haar"), 1)
    state = optimizer.state_dict()
    numbers = sum(t.numel() for entry in state["state"].values() for t in entry.values())
    assert numbers == 2 * sum(p.numel() for p in parameters.values()) + len(parameters)
    assert all(not isinstance(v, torch.Tensor) for v in state["param_groups"][0].values())


def test_adamws_state_is_refused():
    parameters, theirs = run(adamw, 1)
    optimizer = ortho()(parameters.values())
    own_groups = {"param_groups": optimizer.state_dict()["param_groups"]}
    for disguise in ({}, own_groups):
        with pytest.raises(ClearheadError, match="cannot be rotated"):
            optimizer.load_state_dict(theirs.state_dict() | disguise)
    assert not optimizer.state


def test_a_changed_shape_is_refused():
    _, optimizer = run(ortho(), 1)
    changed = {**make_parameters(), "wide": nn.Parameter(torch.zeros(6, 12))}
    with pytest.raises(ClearheadError, match=r"shape \[6, 12\] has shape \[6, 10\]"):
        ortho()(changed.values()).load_state_dict(optimizer.state_dict())


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
    with pytest.raises(ClearheadError, match="of parameter 2 of group 0 is not finite, or too"):
        optimizer.step()
    after = list(parameters.values()), optimizer.state_dict()["state"]
    for old, new in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new)
    for index, entry in before[1].items():
        assert all(torch.equal(entry[key], after[1][index][key]) for key in entry)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": torch.zeros(())}, "lr is 0.0"),
        ({"eps": 0}, "eps is 0"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"limit": 1}, "limit is 1"),
        ({"share": "name"}, "choose one of parameter, size"),
        ({"rotation": "hadamar"}, "did you mean hadamard"),
        ({"rotation": "none"}, "no parameter has an axis to rotate"),
        ({"dtype": torch.bfloat16}, "takes float32"),
    ],
)
def test_bad_settings(options, message):
    parameters = make_parameters(options.pop("dtype", torch.float32))
    with pytest.raises(ClearheadError, match=message):
        ortho(**options)(parameters.values())


SMALL = [2, 3, 5, 6, 7, 17, 63, 64, 65, 96, 127, 512, 704, 768, 1023]


def matrix(rotation, size):
    return rotation.apply(torch.eye(size)).mT


def orthogonality_error(q):
    q = q.double()
    return float((q @ q.mT - torch.eye(len(q))).abs().max())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("hadamard", size) for size in (*SMALL, 1536)),
        *(("haar", size) for size in (2, 3, 17, 64, 768)),
    ],
)
def test_a_rotation_is_orthogonal_and_hadamards_spreads_every_axis_widely(kind, size):
    q = matrix(make_rotation(kind, seed=0, size=size), size)
    assert orthogonality_error(q) < 1e-6
    if kind == "hadamard" and size >= 512:
        # Haar's largest entry is about sqrt(2 log(n²) / n).
        assert q.abs().max() < 1.2 * (4 * torch.tensor(float(size)).log() / size).sqrt()


@pytest.mark.parametrize("size", [8192, 50257, 50304, 65521])
def test_vocabulary_sizes_keep_lengths_and_angles_and_come_back(size):
    rotation = make_rotation("hadamard", seed=0, size=size)
    x = torch.randn(6, size)
    y = rotation.apply(x)
    gram = x.double() @ x.double().mT / size
    torch.testing.assert_close(y.double() @ y.double().mT / size, gram, atol=1e-6, rtol=0)
    torch.testing.assert_close(rotation.apply(y, inverse=True), x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [48, 67, 768])
@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_a_rotation_and_its_inverse_are_products_with_q(kind, size):
    rotation = make_rotation(kind, seed=3, size=size)
    q = matrix(rotation, size)
    x = torch.randn(2, 5, size)
    kept = x.clone()
    torch.testing.assert_close(rotation.apply(x), x @ q.mT)
    torch.testing.assert_close(rotation.apply(x, inverse=True), x @ q)
    assert torch.equal(x, kept)


def test_haar_has_haars_moments():
    draws = torch.stack([haar(4, torch.Generator().manual_seed(i)) for i in range(4000)])
    # E q² = 1/n, E q⁴ = 3/(n(n+2)), and without the sign fix the diagonal's mean is not 0.
    assert float((draws**2).mean(0).sub(1 / 4).abs().max()) < 0.02
    assert float((draws**4).mean(0).sub(3 / 24).abs().max()) < 0.02
    assert float(draws.mean(0).abs().max()) < 0.04


def test_a_rotation_is_a_function_of_seed_and_size():
    def q(**options):
        return matrix(make_rotation("hadamard", **{"seed": 0, "size": 32, **options}), 32)

    state = torch.get_rng_state()
    first = q()
    assert torch.equal(first, q())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, q(seed=1))
    with pytest.raises(ClearheadError, match="did you mean hadamard"):
        make_rotation("hadamar", seed=0, size=8)


def test_signs_of_a_parameter_are_a_function_of_their_key_and_even():
    """Saved runs depend on them: a change here makes their moments meaningless."""
    (block,) = make_rotation("hadamard", seed=0, size=16).blocks
    assert block.signs.tolist() == SIGNS_OF_16
    cpu = torch.device("cpu")
    assert sign_key(0, "module.layers.0.weight", -1) == 293587555
    assert random_signs([293587555], 16, cpu).tolist() == [SIGNS_OF_LAYER]
    keys = [sign_key(0, f"layers.{i}.weight", -1) for i in range(64)]
    signs = random_signs(keys, 512, cpu)
    assert torch.equal(signs[5:6], random_signs(keys[5:6], 512, cpu))
    assert signs.abs().eq(1).all()
    # Means of 512 and products of two parameters' signs, against 5 standard errors.
    assert float(signs.mean(-1).abs().max()) < 5 * 512**-0.5
    products = (signs @ signs.mT / 512).fill_diagonal_(0)
    assert float(products.abs().max()) < 5 * 512**-0.5


SIGNS_OF_LAYER = [-1, 1, 1, 1, 1, -1, -1, -1, 1, -1, 1, 1, -1, 1, -1, 1]
SIGNS_OF_16 = [-1, -1, 1, -1, -1, -1, 1, 1, 1, -1, 1, 1, -1, -1, 1, -1]


def test_wrappers_leave_no_trace_in_names():
    for wrapped in ("module.{}", "module._orig_mod.{}", "_orig_mod.module.{}", "{}"):
        for name in ("layers.0._fsdp_wrapped_module.weight", "layers.0.weight"):
            assert plain_name(wrapped.format(name)) == "layers.0.weight"
