"""The distance between two language models: KL divergence, logits and perplexity."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.eval.sliding import Losses, perplexity_of
from clearhead.models.inspection import batches, evaluating


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Two models on the same windows.

    Attributes:
        tokens: predicted tokens, all but the first of each window.
        perplexity, perplexity_before: of the second model, and of the first.
        divergence: KL(first ‖ second), nats a token.
        largest: the largest difference of two logits.
        relative: the Euclidean distance of all logits over the length of the first's.
    """

    tokens: int
    perplexity: float
    perplexity_before: float
    divergence: float
    largest: float
    relative: float


def distance(before: Any, after: Any, windows: Iterable[Tensor]) -> Distance:
    """Measure both models in their own dtype; probabilities in float32, sums in float64.

    A part of both models' logits of a window is held at a time, where `Losses` can do so.

    Args:
        windows: int64 [length] each.

    Raises:
        ClearheadError: no windows, of one token, of different lengths, or with tokens unknown to
            the model.
    """
    tokens, largest, sums = 0, 0.0, torch.zeros(5, dtype=torch.float64)
    one_of, other_of = Losses(before), Losses(after)
    with evaluating(before), evaluating(after):
        for ids_1T in batches(before, windows, 1):
            if ids_1T.shape[1] == 1:
                raise ClearheadError(
                    "windows of 1 token have no next token to compare: give longer ones, to a "
                    "model with max_position_embeddings of at least 2"
                )
            targets = ids_1T[0, 1:]
            pairs = zip(one_of.logits(ids_1T), other_of.logits(ids_1T), strict=True)
            for one, other in pairs:
                target, targets = targets[: len(one)], targets[len(one) :]
                one, other = one.float(), other.float()
                p, q, apart = one.log_softmax(-1), other.log_softmax(-1), one - other
                largest = max(largest, float(apart.abs().max()))
                parts = (
                    F.nll_loss(p, target, reduction="none"),
                    F.nll_loss(q, target, reduction="none"),
                    F.kl_div(q, p, reduction="none", log_target=True),
                    apart.square(),
                    one.square(),
                )
                sums += torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()
            tokens += ids_1T.shape[1] - 1
    first, second, divergence, squared, length = sums.tolist()
    return Distance(
        tokens=tokens,
        perplexity=perplexity_of(second / tokens),
        perplexity_before=perplexity_of(first / tokens),
        divergence=divergence / tokens,
        largest=largest,
        relative=(squared / length) ** 0.5,
    )
