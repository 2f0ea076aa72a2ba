"""The rotation learned from weights: orthogonal, and without entries that stand out."""

import torch

from clearhead.models import rotated as module
from clearhead.models.rotated import LIMIT, learned_rotation

WIDTH = 64
PLAIN = torch.eye(WIDTH).double()


def _matrices(rows: int = 400) -> list[torch.Tensor]:
    """Normal numbers with some rows of two to four times the usual size, and in one basis already
    evened out, as a random rotation leaves them."""
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, WIDTH, generator=draw) for _ in range(3)]
    for matrix in matrices:
        matrix[:6] *= torch.linspace(2, 4, 6)[:, None]
    return matrices


def _largest(matrices: list[torch.Tensor]) -> list[float]:
    return [float(one.abs().max() / one.square().mean().sqrt()) for one in matrices]


def test_it_is_orthogonal_and_leaves_no_entry_that_stands_out():
    matrices = _matrices()
    turn = learned_rotation(iter(matrices), PLAIN)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(WIDTH).double(), rtol=0, atol=1e-12)
    before, after = _largest(matrices), _largest([one.double() @ turn for one in matrices])
    assert min(before) > 7
    assert max(after) < LIMIT + 1
    torch.testing.assert_close(learned_rotation(iter(matrices), PLAIN), turn, rtol=0, atol=0)
    turned = [one.double() @ turn for one in matrices]
    further = learned_rotation(iter(matrices), turn)  # is learned beyond the first
    assert max(_largest([one @ further for one in turned])) < max(after) + 0.1


def test_rows_of_one_size_and_zeros_are_left_as_they_are(monkeypatch):
    """Without a long row there is nothing to learn, and no step is made."""
    monkeypatch.delattr(module, "_cayley")
    matrices = [torch.ones(5, WIDTH), torch.zeros(3, WIDTH)]
    turn = learned_rotation(iter(matrices), PLAIN)
    torch.testing.assert_close(turn, torch.eye(WIDTH).double(), rtol=0, atol=0)
