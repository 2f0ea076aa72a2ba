"""Perplexity of causal language models of transformers, on windows of any length."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.data import Corpus, windows
from clearhead.data.batches import IGNORED, document_inputs, document_starts
from clearhead.errors import NOT_FINITE, ClearheadError
from clearhead.eval.token_losses import Losses, perplexity_of
from clearhead.models.inspection import batches, evaluating, lack_of_positions

BATCH = 4096  # tokens run together by `lengths`


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Loss and perplexity of a text.

    Attributes:
        length: tokens in a window.
        tokens: predicted tokens, length − 1 a window, less those that begin another document
            where documents are told apart.
        loss: mean cross-entropy, nats a predicted token; None where the model cannot read the text.
        perplexity: exp(loss), or None.
        reason: why there is no loss.
        by_window: the loss of each window that has a predicted token.
    """

    length: int
    tokens: int
    loss: float | None
    perplexity: float | None
    reason: str | None = None
    by_window: tuple[float, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why there is no perplexity that is a number."""
        if self.perplexity is None or math.isfinite(self.perplexity):
            return self.reason
        return f"the loss is {self.loss}, so there is no perplexity: {NOT_FINITE}"


def perplexity(
    model: Any, windows: Iterable[Tensor], *, length: int, batch_size: int, tokenizer: Any = None
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
        tokenizer: tells where documents begin. Where it is given, those of a window are read as
            training with document masks reads them: none sees another, positions begin again in
            each, and its first token is not predicted. For models that take document_ids.

    Raises:
        ClearheadError: no windows, other lengths, or token ids unknown to the model.
    """
    if length < 2:
        raise ClearheadError(f"length is {length}: predicting a token takes at least 2")
    if reason := lack_of_positions(model, length):
        return _cannot(length, reason)
    by_window: list[Tensor] = []  # sums of losses, and numbers of them, [B, 2] a batch
    losses = Losses(model)
    with evaluating(model):
        for ids_BT in batches(model, windows, batch_size):
            if ids_BT.shape[1] != length:
                raise ClearheadError(f"length is {length}, but the windows have {ids_BT.shape[1]}")
            inputs = (
                {}
                if tokenizer is None
                else document_inputs(ids_BT, document_starts(ids_BT, tokenizer))
            )
            counted_BT = inputs.pop("labels", ids_BT)[:, 1:] != IGNORED
            try:
                loss_BT = losses(ids_BT, 1, **inputs).double().masked_fill(~counted_BT, 0.0)
            except (ClearheadError, IndexError) as error:
                if length <= getattr(model.config, "max_position_embeddings", length):
                    raise
                return _cannot(length, str(error))
            by_window.append(torch.stack([loss_BT.sum(1), counted_BT.sum(1)], 1).cpu())
    sums_N2 = torch.cat(by_window)
    count = int(sums_N2[:, 1].sum())
    if not count:
        return _cannot(length, "no window holds a token that another of its document foretells")
    loss = float(sums_N2[:, 0].sum()) / count
    sums_N2 = sums_N2[sums_N2[:, 1] > 0]
    return Perplexity(
        length=length,
        tokens=count,
        loss=loss,
        perplexity=perplexity_of(loss),
        by_window=tuple((sums_N2[:, 0] / sums_N2[:, 1]).tolist()),
    )


def lengths(
    model: Any,
    corpus: Corpus,
    *,
    lengths: Sequence[int],
    tokens: int,
    documents_apart: bool = False,
) -> list[dict[str, Any]]:
    """Loss and perplexity on the validation text, cut into windows of each length.

    All lengths read the same number of tokens: `tokens`, or what the corpus has, rounded down to a
    whole number of the longest windows. Where each length divides the longest and there is one
    source, it is the same text. With `documents_apart` windows are read as by a model that was
    trained with document masks (`tokenizer` of `perplexity`).

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
    tokenizer = corpus.tokenizer if documents_apart else None
    out: list[dict[str, Any]] = []
    for length in lengths:
        if length in fitting:
            text = windows(corpus, length=length, count=budget // length)
            size = max(1, BATCH // length)
            result = perplexity(model, text, length=length, batch_size=size, tokenizer=tokenizer)
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
    if result.problem is not None:
        dimensions["reason"] = result.problem
    return [
        {"metric": "loss", "value": result.loss, **dimensions},
        {"metric": "perplexity", "value": result.perplexity, **dimensions},
    ]


def _cannot(length: int, reason: str) -> Perplexity:
    return Perplexity(length=length, tokens=0, loss=None, perplexity=None, reason=reason)
