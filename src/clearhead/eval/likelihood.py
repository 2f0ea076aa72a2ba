"""Perplexity of any causal language model of transformers, on windows of any length."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data import Corpus, windows
from clearhead.diagnose.running import backbone, batches, evaluating, longest_text
from clearhead.errors import ClearheadError

LOGITS = 1 << 24  # held at once where the head can be called by itself: 64 MiB in float32
BATCH = 4096  # tokens run together by `lengths`


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a text was predicted.

    Attributes:
        length: tokens in a window.
        tokens: predicted tokens, length − 1 a window.
        loss: mean cross-entropy, nats a predicted token; None where the model cannot.
        perplexity: exp(loss); None where the model cannot.
        reason: why it cannot.
    """

    length: int
    tokens: int
    loss: float | None
    perplexity: float | None
    reason: str | None = None


def perplexity(
    model: Any, windows: Iterable[Tensor], *, length: int, batch_size: int
) -> Perplexity:
    """Mean loss over windows of text: every token but a window's first is predicted once.

    The loss of a token is computed in float32 at least and summed in float64, a part of the rows at
    a time, so that [B, T, vocabulary] is never held where the model's logits are its head applied
    to its last hidden state. The model runs in its own dtype, without autocast, in evaluation mode;
    its mode is then as it was.

    Args:
        windows: int64 [length] each.
        length: 2 or more. Beyond the learned positions of a model the result has a reason instead
            of a value.
        batch_size: windows run together; it changes speed and memory, not the result.

    Raises:
        ClearheadError: no windows, other lengths, or token ids unknown to the model.
    """
    if length < 2:
        raise ClearheadError(f"length is {length}: predicting a token takes at least 2")
    limit = longest_text(model)
    if limit is not None and length > limit:
        return _cannot(
            length, f"the model has {limit} learned positions, too few for {length} tokens"
        )
    total, count = 0.0, 0
    with evaluating(model):
        logits_of: Callable[[Tensor], Iterable[Tensor]] | None = None
        for ids_BT in batches(model, windows, batch_size):
            if ids_BT.shape[1] != length:
                raise ClearheadError(f"length is {length}, but the windows have {ids_BT.shape[1]}")
            try:
                if logits_of is None:
                    by_parts = _head_makes_logits(model, ids_BT)
                    logits_of = _by_parts(model) if by_parts else _whole(model)
                total += _loss(logits_of(ids_BT), ids_BT[:, 1:].flatten())
            except (ClearheadError, IndexError) as error:
                if length <= getattr(model.config, "max_position_embeddings", length):
                    raise
                return _cannot(length, str(error))
            count += ids_BT[:, 1:].numel()
    loss = total / count
    return Perplexity(
        length=length,
        tokens=count,
        loss=loss,
        perplexity=float(torch.tensor(loss, dtype=torch.float64).exp()),
    )


def lengths(
    model: Any, corpus: Corpus, *, lengths: Sequence[int], tokens: int
) -> list[dict[str, Any]]:
    """Loss and perplexity on the validation text, cut into windows of each length.

    All lengths read the same number of tokens: `tokens`, or what the corpus has, rounded down to a
    whole number of the longest windows. Where each length divides the longest and there is one
    source, it is the same text.

    Returns:
        Payloads of "measure" records: "loss" and "perplexity" with "length", "split" and
        "predicted_tokens"; the value None with a "reason" where the model or the text is too short.
    """
    held = [len(stream) for stream in corpus.split("validation")]
    available = {
        length: min(tokens, sum(size // length * length for size in held)) for length in lengths
    }
    fitting = [length for length in lengths if available[length] >= length]
    budget = min((available[length] for length in fitting), default=0)
    budget -= budget % max(fitting, default=1)
    out: list[dict[str, Any]] = []
    for length in lengths:
        if length in fitting:
            text = windows(corpus, length=length, count=budget // length)
            result = perplexity(model, text, length=length, batch_size=max(1, BATCH // length))
        else:
            result = _cannot(
                length,
                f"{tokens:,} tokens of {sum(held):,} in the validation split hold no window of "
                f"{length:,}",
            )
        out += _measures(result)
    return out


def _measures(result: Perplexity) -> list[dict[str, Any]]:
    dimensions: dict[str, Any] = {"split": "validation", "length": result.length}
    dimensions["predicted_tokens"] = result.tokens
    if result.reason is not None:
        dimensions["reason"] = result.reason
    return [
        {"metric": "loss", "value": result.loss, **dimensions},
        {"metric": "perplexity", "value": result.perplexity, **dimensions},
    ]


def _cannot(length: int, reason: str) -> Perplexity:
    return Perplexity(length=length, tokens=0, loss=None, perplexity=None, reason=reason)


def _loss(parts: Iterable[Tensor], target_N: Tensor) -> float:
    """Σ −log softmax(logits)[target], over parts of the rows in order."""
    total, start = 0.0, 0
    for logits_NV in parts:
        wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        target = target_N[start : start + len(wide)]
        total += float(F.cross_entropy(wide, target, reduction="none").double().sum())
        start += len(wide)
    return total


def _head_makes_logits(model: Any, ids_BT: Tensor) -> bool:
    """Whether the logits are just the output matrix applied to the last hidden state.

    Some models scale or cap them afterwards. Tried on a few tokens rather than looked up.
    """
    head = model.get_output_embeddings()
    if head is None or backbone(model) is model:
        return False
    few = ids_BT[:1, :16]
    logits = model(input_ids=few, use_cache=False).logits
    hidden = backbone(model)(input_ids=few, use_cache=False)[0]
    return torch.equal(head(hidden).to(logits.dtype), logits)


def _by_parts(model: Any) -> Callable[[Tensor], Iterable[Tensor]]:
    head = model.get_output_embeddings()

    def logits_of(ids_BT: Tensor) -> Iterable[Tensor]:
        hidden = backbone(model)(input_ids=ids_BT, use_cache=False)[0][:, :-1].flatten(0, 1)
        rows = max(1, LOGITS // len(head.weight))
        return (head(part) for part in hidden.split(rows))

    return logits_of


def _whole(model: Any) -> Callable[[Tensor], Iterable[Tensor]]:
    def logits_of(ids_BT: Tensor) -> Iterable[Tensor]:
        logits = model(input_ids=ids_BT, use_cache=False).logits
        return chain.from_iterable(
            row[:-1].split(max(1, LOGITS // row.shape[-1])) for row in logits
        )

    return logits_of
