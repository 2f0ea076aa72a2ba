"""The distance of two language models that should be alike: divergence and perplexity."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.eval.token_losses import perplexity_of
from clearhead.models.inspection import batches, evaluating

ROWS = 64  # tokens whose distributions are held at once


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

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def distance(before: Any, after: Any, windows: Iterable[Tensor], **inputs: Any) -> Distance:
    """Measure both models in their own dtype; probabilities and sums in float32 and float64.

    Args:
        windows: int64 [length] each.
        inputs: what else `after` takes, such as an attention_mask.

    Raises:
        ClearheadError: no windows, of one token, of different lengths, or with tokens unknown to
            the model.
    """
    tokens, losses, divergence = 0, [0.0, 0.0], 0.0
    largest = squared = length = 0.0
    with evaluating(before), evaluating(after):
        for ids_BT in batches(before, windows, 1):
            if ids_BT.shape[1] == 1:
                raise ClearheadError(
                    "windows of 1 token have no next token to compare: give longer ones, to a "
                    "model with max_position_embeddings of at least 2"
                )
            logits = before(input_ids=ids_BT, use_cache=False).logits[0].float()
            other = after(input_ids=ids_BT, use_cache=False, **inputs).logits[0].float()
            parts = zip(logits[:-1].split(ROWS), other[:-1].split(ROWS), strict=True)
            targets = ids_BT[0, 1:].split(ROWS)
            for (one_RV, two_RV), target_R in zip(parts, targets, strict=True):
                p_RV, q_RV = one_RV.log_softmax(-1), two_RV.log_softmax(-1)
                for index, log_RV in enumerate((p_RV, q_RV)):
                    losses[index] += float(F.nll_loss(log_RV, target_R, reduction="sum"))
                divergence += float(F.kl_div(q_RV, p_RV, log_target=True, reduction="sum"))
                apart_RV = one_RV - two_RV
                largest = max(largest, float(apart_RV.abs().max()))
                squared += float(apart_RV.square().sum(dtype=torch.float64))
                length += float(one_RV.square().sum(dtype=torch.float64))
            tokens += ids_BT.shape[1] - 1
    first, second = (perplexity_of(loss / tokens) for loss in losses)
    return Distance(
        tokens=tokens,
        perplexity=second,
        perplexity_before=first,
        divergence=divergence / tokens,
        largest=largest,
        relative=(squared / length) ** 0.5,
    )
