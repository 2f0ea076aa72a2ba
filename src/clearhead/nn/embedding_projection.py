"""Square matrices behind the embedding and before the head: OSP's EmbProj."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.init import orthogonal


class EmbeddingProjection(nn.Module):
    """x Pᵀ, for x [..., C] and P [C, C], from a random orthogonal P (arXiv 2506.19697, EmbProj).

    AdamW trains the embedding, and Muon, whose steps favour no axis, trains P. P is no `nn.Linear`,
    so that quantisation schemes leave it in full precision, as they leave embedding and head.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        orthogonal(self.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def embedding_projection(width: int, *, wanted: bool) -> nn.Module:
    """The matrix, or the identity."""
    return EmbeddingProjection(width) if wanted else nn.Identity()
