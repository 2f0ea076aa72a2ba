"""Hadamard rotation by two small products, against the whole matrix."""

import pytest
import torch

from clearhead.ops import oracles
from clearhead.ops.hadamard import block_of, factors, rotate_blocks


@pytest.mark.parametrize(
    ("width", "block"), [(1, 1), (6, 2), (24, 8), (64, 64), (1536, 512), (2048, 512)]
)
def test_blocks_are_turned_by_sylvester_s_matrix_and_turned_back(width, block):
    assert block_of(width) == block
    matrices = [each.double() for each in factors(block)]
    x = torch.randn(2, 3, width, dtype=torch.float64)
    turned = rotate_blocks(x, *matrices)
    assert torch.allclose(turned, oracles.rotate_blocks(x, block), atol=1e-12)
    assert torch.allclose(rotate_blocks(turned, *matrices), x, atol=1e-12)
    if block > 1:
        one = torch.zeros(width, dtype=torch.float64)
        one[0] = block**0.5
        assert torch.allclose(rotate_blocks(one, *matrices)[:block].abs(), torch.ones(1).double())


def test_the_gradient_is_turned_back():
    """In blocks of an odd power of two, whose factors differ, of rows that lie apart in memory."""
    matrices = [each.double() for each in factors(8)]
    x = torch.randn(24, 3, dtype=torch.float64, requires_grad=True).mT
    grad = torch.randn(3, 24, dtype=torch.float64)
    (found,) = torch.autograd.grad(rotate_blocks(x, *matrices), x, grad)
    assert torch.allclose(found, oracles.rotate_blocks(grad, 8), atol=1e-12)
    assert rotate_blocks(x[:0], *matrices).shape == (0, 24)
