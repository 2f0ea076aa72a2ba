"""The distance between two language models: KL divergence, logits and perplexity."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.eval.sliding import perplexity_of
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
    """Measure both models in their own dtype; probabilities and sums in float32 and float64.

    Args:
        windows: int64 [length] each.
        inputs: what else `after` takes, such as an attention_mask.

    Raises:
        ClearheadError: no windows, of one token, of different lengths, or with tokens unknown to
            the model.
    """
    tokens, largest, sums = 0, 0.0, np.zeros(5)
    with evaluating(before), evaluating(after):
        for ids_BT in batches(before, windows, 1):
            if ids_BT.shape[1] == 1:
                raise ClearheadError(
                    "windows of 1 token have no next token to compare: give longer ones, to a "
                    "model with max_position_embeddings of at least 2"
                )
            one_TV = before(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
            two_TV = after(input_ids=ids_BT, use_cache=False, **inputs).logits[0, :-1].float()
            p_TV, q_TV, apart_TV = one_TV.log_softmax(-1), two_TV.log_softmax(-1), one_TV - two_TV
            sums += [
                float(F.nll_loss(p_TV, ids_BT[0, 1:], reduction="sum")),
                float(F.nll_loss(q_TV, ids_BT[0, 1:], reduction="sum")),
                float(F.kl_div(q_TV, p_TV, log_target=True, reduction="sum")),
                float(apart_TV.square().sum(dtype=torch.float64)),
                float(one_TV.square().sum(dtype=torch.float64)),
            ]
            largest = max(largest, float(apart_TV.abs().max()))
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
