"""Losses, perplexity and distance of causal language models over sliding windows.

A window of `length` tokens moves on by `stride` (Press et al., arXiv 2108.12409, appendix B). The
first window of a document predicts all its tokens but the first; each later one predicts the tokens
that no window before it has, at most `stride`, with at least length − stride tokens of context (one
less where stride = length: a window's first token then has no context, and is left out).
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data import Corpus, windows
from clearhead.data.batches import IGNORED, document_inputs, document_starts
from clearhead.errors import NOT_FINITE, ClearheadError
from clearhead.measure.answers import reset_dynamic_rope
from clearhead.models.inspection import batches, evaluating, lack_of_positions

BATCH = 4096  # tokens run together by `lengths`
LOGITS = 1 << 24  # held at once where the head can be called by itself: 64 MiB in float32
_LARGEST = math.log(sys.float_info.max)


class Scored(NamedTuple):
    """The loss of a window's tokens from `position` on, in nats, float64 [tokens]; its first token
    is at `start` in a document. With masked documents their first tokens do not count."""

    document: int
    start: int
    position: int
    loss: np.ndarray


def windows_of(tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first) of each window of a document of `tokens` tokens: tokens from `first` on
    are predicted."""
    if length < 2:
        raise ClearheadError(f"length is {length}: predicting a token takes at least 2")
    if not 1 <= stride <= length:
        raise ClearheadError(f"stride is {stride}: give 1 to the window's length, {length}")
    for start in range(0, max(tokens - length, 0) + stride, stride):
        stop = min(start + length, tokens)
        first = max(start + 1, start - stride + length if start else 1)
        if first < stop:
            yield start, stop, first


def sliding(
    model: Any,
    documents: Iterable[Any],
    *,
    length: int,
    stride: int,
    batch_tokens: int,
    prefix: Sequence[int] = (),
    tokenizer: Any = None,
) -> list[Scored]:
    """The loss of every predicted token of every document, 1-D token ids; windows of one shape run
    together, about `batch_tokens` tokens of them, and come in that order; `prefix` and `tokenizer`
    as of `perplexity`. The log-softmax is in float32 at least: in float16 a sum over a window
    overflows at 65,504."""
    texts = list(documents)
    cut = sorted(
        (stop - start, first - start, number, start)
        for number, text in enumerate(texts)
        for start, stop, first in windows_of(len(text), length, stride)
    )
    scored: list[Scored] = []
    with evaluating(model):
        head = plain_head(model)
        for (size, first), group in groupby(cut, key=lambda window: window[:2]):
            places = [(number, start) for *_, number, start in group]
            ids = (np.asarray(texts[n][at : at + size], dtype=np.int64) for n, at in places)
            left = iter(places)
            for ids_BT in batches(model, map(torch.from_numpy, ids), batch_tokens // length or 1):
                inputs: dict[str, Tensor] = {}
                if tokenizer is not None:
                    inputs = document_inputs(ids_BT, document_starts(ids_BT, tokenizer))
                counted_BN = inputs.pop("labels", ids_BT)[:, first:] != IGNORED
                before_BP = ids_BT.new_tensor(prefix).expand(len(ids_BT), -1)
                read_BS, targets = torch.cat([before_BP, ids_BT], 1), ids_BT[:, first:].flatten()
                losses = []
                for logits_NV in logits_of(model, head, read_BS, len(prefix) + first, **inputs):
                    target_N, targets = targets[: len(logits_NV)], targets[len(logits_NV) :]
                    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
                    losses.append(F.cross_entropy(wide, target_N, reduction="none"))
                loss_BN = torch.cat(losses).view(len(ids_BT), -1).double().cpu()
                for loss_N, counted_N in zip(loss_BN, counted_BN.cpu(), strict=True):
                    scored.append(Scored(*next(left), first, loss_N[counted_N].numpy()))
    return scored


def plain_head(model: Any) -> Any:
    """The output head, if its product with the last hidden state is the logits, as tested on two
    tokens; None for models that scale or cap them."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    ids_1T = torch.arange(2, device=model.device)[None]
    pair = model, model.base_model
    logits, hidden = (part(input_ids=ids_1T, use_cache=False)[0] for part in pair)
    return head if torch.equal(head(hidden).to(logits.dtype), logits) else None


def logits_of(
    model: Any, head: Any, ids_BT: Tensor, first: int = 1, **inputs: Tensor
) -> Iterator[Tensor]:
    """Yield the logits that predict the tokens from `first` on, row by row, in parts [N, V]. A
    `plain_head` computes predicted tokens only, so that [B, T, V] is never stored."""
    reset_dynamic_rope(model)
    options: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, **inputs}
    if head is not None:
        hidden_NC = model.base_model(**options)[0][:, first - 1 : -1].flatten(0, 1)
        yield from map(head, hidden_NC.split(LOGITS // len(head.weight) or 1))
        return
    for row_TV in model(**options).logits:
        yield from row_TV[first - 1 : -1].split(LOGITS // row_TV.shape[-1] or 1)


def perplexity_of(loss: float) -> float:
    """exp(loss); infinite where that is beyond float64."""
    return math.inf if loss > _LARGEST else math.exp(loss)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Mean loss of a text, in nats a predicted token, whole and by window; a `reason` for none, or
    for one not finite. `unused`: names of quantised layers that no token passed through."""

    tokens: int = 0
    loss: float | None = None
    reason: str | None = None
    by_window: tuple[float, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float | None:
        """exp(loss), or None."""
        return None if self.loss is None else perplexity_of(self.loss)


def perplexity(
    model: Any,
    windows: Iterable[Tensor],
    *,
    batch_size: int,
    tokenizer: Any = None,
    prefix: Sequence[int] = (),
) -> Perplexity:
    """Mean loss over windows of text, in nats: every token but a window's first is predicted once.

    Args:
        windows: int64 [length] each; beyond the model's positions there is a `reason` and no loss.
        batch_size: windows run together; it changes speed and memory, not the results.
        tokenizer: if given, documents of a window, found by its begin and end tokens, are read
            apart as in training with document masks, and their first tokens do not count.
        prefix: tokens read before every window, and not predicted.
    """
    texts = list(windows)
    if not texts:
        raise ClearheadError("no windows to measure on: give at least one")
    length = max(map(len, texts))
    if reason := lack_of_positions(model, len(prefix) + length):
        return Perplexity(reason=reason)
    settings: dict[str, Any] = {"length": length, "stride": length, "prefix": prefix}
    settings |= {"batch_tokens": batch_size * length, "tokenizer": tokenizer}
    parts = [one.loss for one in sliding(model, texts, **settings) if len(one.loss)]
    if not parts:
        return Perplexity(reason="no window holds a token that another of its document foretells")
    sums, count = [float(part.sum()) for part in parts], sum(map(len, parts))
    loss = math.fsum(sums) / count
    if not math.isfinite(perplexity_of(loss)):
        reason = f"the loss is {loss}, so there is no perplexity: {NOT_FINITE}"
    means = tuple(total / len(part) for total, part in zip(sums, parts, strict=True))
    return Perplexity(tokens=count, loss=loss, reason=reason or None, by_window=means)


def distance(before: Any, after: Any, windows: Iterable[Tensor]) -> dict[str, float]:
    """Differences of two models on windows, int64 [length]; probabilities in float32, sums in
    float64: perplexities; `divergence`, KL(first ‖ second) in nats a token; the `largest`
    difference of two logits; `relative`, ‖difference of all logits‖ / ‖the first model's logits‖,
    Euclidean; the number of predicted `tokens`."""
    tokens, largest, sums = 0, 0.0, torch.zeros(5, dtype=torch.float64)
    with evaluating(before), evaluating(after):
        pair = [(model, plain_head(model)) for model in (before, after)]
        for ids_1T in batches(before, windows, 1):
            targets = ids_1T[0, 1:]
            for one, other in zip(*(logits_of(*each, ids_1T) for each in pair), strict=True):
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
    return {
        "tokens": tokens,
        "perplexity": perplexity_of(second / tokens),
        "perplexity_before": perplexity_of(first / tokens),
        "divergence": divergence / tokens,
        "largest": largest,
        "relative": (squared / length) ** 0.5,
    }


def lengths(
    model: Any,
    corpus: Corpus,
    *,
    lengths: Sequence[int],
    tokens: int,
    documents_apart: bool = False,
) -> list[dict[str, Any]]:
    """Payloads of records: "loss" (nats a token) and "perplexity" of the validation text, cut into
    windows of each length; None with a "reason" where the model or the text is too short.

    All lengths read the same number of tokens: `tokens`, or all that the corpus has, rounded down
    to a whole number of the longest windows. With `documents_apart` they are read as in training
    with document masks: no document sees another, and positions restart in each.
    """
    held = [len(stream) for stream in corpus.split("validation")]
    room = {size: min(tokens, sum(x // size * size for x in held)) for size in lengths}
    fitting = [size for size in lengths if room[size] >= size]
    budget = min((room[size] for size in fitting), default=0)
    budget -= budget % max(fitting, default=1)
    lines: list[dict[str, Any]] = []
    for size in lengths:
        read = f"the {min(tokens, sum(held)):,} tokens to read of the validation split's"
        one = Perplexity(reason=f"{read} {sum(held):,} hold no window of {size:,}")
        if size in fitting:
            texts = windows(corpus, length=size, count=budget // size)
            tokenizer = corpus.tokenizer if documents_apart else None
            one = perplexity(model, texts, batch_size=max(1, BATCH // size), tokenizer=tokenizer)
        line = {"split": "validation", "length": size, "predicted_tokens": one.tokens}
        line |= {} if one.reason is None else {"reason": one.reason}
        for metric in ("loss", "perplexity"):
            lines.append({"metric": metric, "value": getattr(one, metric), **line})
    return lines
