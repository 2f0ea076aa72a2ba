"""Loss of each token, without ever holding [B, T, vocabulary]."""

import math
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.measure.rope_limits import reset_dynamic_rope
from clearhead.models.inspection import backbone

_LARGEST = math.log(sys.float_info.max)
LOGITS = 1 << 24  # held at once where the head can be called by itself: 64 MiB in float32


def perplexity_of(loss: float) -> float:
    """exp(loss); infinite where that is beyond float64."""
    return math.inf if loss > _LARGEST else math.exp(loss)


class Losses:
    """−log p of tokens, by a causal language model of transformers.

    The logarithm of the softmax is taken in float32 at least, whatever the model's dtype: in
    float16 a sum over a window overflows at 65,504. Where the logits are the head applied to the
    last hidden state, the head is applied only to the places that are asked for, a part at a time.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._logits: Callable[[Tensor, int, dict[str, Tensor]], Iterable[Tensor]] | None = None

    def __call__(self, ids_BT: Tensor, first: int = 1, **inputs: Tensor) -> Tensor:
        """The loss of the tokens from `first` on, given all before them in their row.

        Args:
            ids_BT: int64, on the model's device.
            first: from 1 to T − 1.
            inputs: what else the model takes, such as position_ids.

        Returns:
            Float32 (float64 for such a model), [B, T − first], nats.
        """
        if self._logits is None:
            by_parts = head_makes_logits(self._model, ids_BT)
            self._logits = self._by_parts if by_parts else self._whole
        reset_dynamic_rope(self._model)
        target_N = ids_BT[:, first:].flatten()
        found, start = [], 0
        for logits_NV in self._logits(ids_BT, first, inputs):
            wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            target = target_N[start : start + len(wide)]
            found.append(F.cross_entropy(wide, target, reduction="none"))
            start += len(wide)
        return torch.cat(found).view(len(ids_BT), -1)

    def _by_parts(self, ids_BT: Tensor, first: int, inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        head = self._model.get_output_embeddings()
        hidden = backbone(self._model)(input_ids=ids_BT, use_cache=False, **inputs)[0]
        asked = hidden[:, first - 1 : -1].flatten(0, 1)
        return (head(part) for part in asked.split(max(1, LOGITS // len(head.weight))))

    def _whole(self, ids_BT: Tensor, first: int, inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        logits = self._model(input_ids=ids_BT, use_cache=False, **inputs).logits
        return chain.from_iterable(
            row[first - 1 : -1].split(max(1, LOGITS // row.shape[-1])) for row in logits
        )


def head_makes_logits(model: Any, ids_BT: Tensor) -> bool:
    """True if the logits are just the output matrix applied to the last hidden state.

    Some models scale or cap them afterwards. Tried on a few tokens rather than looked up.
    """
    head = model.get_output_embeddings()
    if head is None or backbone(model) is model:
        return False
    few = ids_BT[:1, :16]
    logits = model(input_ids=few, use_cache=False).logits
    hidden = backbone(model)(input_ids=few, use_cache=False)[0]
    return torch.equal(head(hidden).to(logits.dtype), logits)
