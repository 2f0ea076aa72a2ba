"""The distance between two language models: KL divergence, logits and perplexity."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.eval.sliding import LOGITS, perplexity_of
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


def distance(before: Any, after: Any, windows: Iterable[Tensor], **inputs: Any) -> Distance:
    """Measure both models in their own dtype; probabilities in float32, sums in float64.

    Beside both models' logits of a window, a part of them is held at a time.

    Args:
        windows: int64 [length] each.
        inputs: what else `after` takes, such as an attention_mask.

    Raises:
        ClearheadError: no windows, of one token, of different lengths, or with tokens unknown to
            the model.
    """
    tokens, largest, sums = 0, 0.0, torch.zeros(5, dtype=torch.float64)
    with evaluating(before), evaluating(after):
        for ids_BT in batches(before, windows, 1):
            if ids_BT.shape[1] == 1:
                raise ClearheadError(
                    "windows of 1 token have no next token to compare: give longer ones, to a "
                    "model with max_position_embeddings of at least 2"
                )
            one_TV = before(input_ids=ids_BT, use_cache=False).logits[0, :-1]
            two_TV = after(input_ids=ids_BT, use_cache=False, **inputs).logits[0, :-1]
            rows = max(1, LOGITS // one_TV.shape[-1])
            for one, two, target in zip(
                one_TV.split(rows), two_TV.split(rows), ids_BT[0, 1:].split(rows), strict=True
            ):
                one, two = one.float(), two.float()
                p, q, apart = one.log_softmax(-1), two.log_softmax(-1), one - two
                largest = max(largest, float(apart.abs().max()))
                parts = (
                    F.nll_loss(p, target, reduction="none"),
                    F.nll_loss(q, target, reduction="none"),
                    F.kl_div(q, p, reduction="none", log_target=True),
                    apart.square(),
                    one.square(),
                )
                sums += torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()
            tokens += len(one_TV)
    first, second, divergence, squared, length = sums.tolist()
    return Distance(
        tokens=tokens,
        perplexity=perplexity_of(second / tokens),
        perplexity_before=perplexity_of(first / tokens),
        divergence=divergence / tokens,
        largest=largest,
        relative=(squared / length) ** 0.5,
    )
