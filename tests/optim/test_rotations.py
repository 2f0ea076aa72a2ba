import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.optim.rotations import haar, make_rotation, plain_name, random_signs, sign_key

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
