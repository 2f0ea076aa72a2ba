"""Losses, perplexity and distance of causal language models over sliding windows.

A window of `length` tokens moves on by `stride` (Press et al., arXiv 2108.12409, appendix B). The
first window of a document predicts all its tokens but the first; each later one predicts the tokens
that no window before it has, at most `stride`, with at least length − stride tokens of context (one
less where stride = length: then a window's first token is predicted by nothing, and left out). The
last window may be shorter.

Two windows with different left edges share no state above the first layer's projections, so with a
stride below the length each is computed afresh.
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
    """The predicted tokens of one window.

    Attributes:
        document: index of the document.
        start: index of the window's first token in the document.
        position: index of the first predicted token in the window; the others follow.
        loss: nats, float64 [tokens]; with masked documents, without their first tokens.
    """

    document: int
    start: int
    position: int
    loss: np.ndarray


def windows_of(tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first) of each window of a document of `tokens` tokens: tokens from `first` on
    are predicted.

    Raises:
        ClearheadError: a length below 2, or a stride below 1 or above the length.
    """
    if length < 2:
        raise ClearheadError(f"length is {length}: predicting a token takes at least 2")
    if not 1 <= stride <= length:
        raise ClearheadError(
            f"stride is {stride}: give 1 to the window's length, {length}; "
            "a longer one would leave tokens out"
        )
    done = 1
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens)
        first = max(done, start + 1)
        if first < stop:
            yield start, stop, first
        if stop == tokens:
            return
        done = stop


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
    """The loss of every predicted token of every document.

    Windows of the same shape run together, whatever their document, and come in that order. The
    model runs in its own dtype, without autocast, in evaluation mode.

    Args:
        documents: token ids, 1-D integers of numpy or torch.
        batch_tokens: tokens run together; it changes speed and memory, not the results.
        prefix: tokens read before every window, and not predicted.
        tokenizer: if given, documents within a window, found by its begin and end tokens, are read
            as in training with document masks: none sees another, positions restart in each, and
            its first token does not count. Only for models that take document_ids.
    """
    texts = list(documents)
    cut = sorted(
        (stop - start, first - start, number, start)
        for number, text in enumerate(texts)
        for start, stop, first in windows_of(len(text), length, stride)
    )
    scored: list[Scored] = []
    with evaluating(model):
        losses = Losses(model)
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
                read_BS = torch.cat([before_BP, ids_BT], 1)
                loss_BN = losses(read_BS, len(prefix) + first, **inputs).double().cpu()
                for loss_N, counted_N in zip(loss_BN, counted_BN.cpu(), strict=True):
                    scored.append(Scored(*next(left), first, loss_N[counted_N].numpy()))
    return scored


class Losses:
    """Computes −log p of tokens by a causal language model of transformers, in evaluation mode.

    The log-softmax is computed in float32 at least, whatever the model's dtype: in float16 a sum
    over a window overflows at 65,504. Where the logits are the head applied to the last hidden
    state (tested on a few tokens: some models scale or cap them), the head is applied to predicted
    positions only, in parts, and [B, T, vocabulary] is never stored.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._model, self._head = model, head if _is_plain(model, head) else None

    def __call__(self, ids_BT: Tensor, first: int = 1, **inputs: Tensor) -> Tensor:
        """The loss of the tokens from `first` on, given all before them in their row: float32
        (float64 for such a model), [B, T − first], nats."""
        targets, losses = ids_BT[:, first:].flatten(), []
        for logits_NV in self.logits(ids_BT, first, **inputs):
            target_N, targets = targets[: len(logits_NV)], targets[len(logits_NV) :]
            wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            losses.append(F.cross_entropy(wide, target_N, reduction="none"))
        return torch.cat(losses).view(len(ids_BT), -1)

    def logits(self, ids_BT: Tensor, first: int = 1, **inputs: Tensor) -> Iterator[Tensor]:
        """Yield the logits that predict the tokens from `first` on, row by row, in parts [N, V]."""
        reset_dynamic_rope(self._model)
        options: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, **inputs}
        if self._head is not None:
            hidden_NC = self._model.base_model(**options)[0][:, first - 1 : -1].flatten(0, 1)
            yield from map(self._head, hidden_NC.split(LOGITS // len(self._head.weight) or 1))
            return
        for row_TV in self._model(**options).logits:
            yield from row_TV[first - 1 : -1].split(LOGITS // row_TV.shape[-1] or 1)


def _is_plain(model: Any, head: Any) -> bool:
    """True if the head alone makes the logits of the last hidden state."""
    if head is None or model.base_model is model:
        return False
    ids_1T = torch.arange(2, device=model.device)[None]
    parts = (part(input_ids=ids_1T, use_cache=False)[0] for part in (model, model.base_model))
    logits, hidden = parts
    return torch.equal(head(hidden).to(logits.dtype), logits)


def perplexity_of(loss: float) -> float:
    """exp(loss); infinite where that is beyond float64."""
    return math.inf if loss > _LARGEST else math.exp(loss)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Loss and perplexity of a text.

    Attributes:
        tokens: predicted tokens, length − 1 a window, less those that begin another document
            where documents are masked.
        loss: mean cross-entropy, nats a predicted token; None where the model cannot read the text.
        reason: why there is no loss, or no finite perplexity.
        by_window: the loss of each window that has a predicted token.
    """

    tokens: int = 0
    loss: float | None = None
    reason: str | None = None
    by_window: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float | None:
        """exp(loss), or None."""
        return None if self.loss is None else perplexity_of(self.loss)


def perplexity(
    model: Any,
    windows: Iterable[Tensor],
    *,
    length: int,
    batch_size: int,
    tokenizer: Any = None,
    prefix: Sequence[int] = (),
) -> Perplexity:
    """Mean loss over windows of text: every token but a window's first is predicted once.

    Args:
        windows: int64 [length] each.
        length: if above the model's number of positions, the result has a reason and no loss.
        batch_size: windows run together.
        tokenizer: as in `sliding`.
        prefix: as in `sliding`.

    Raises:
        ClearheadError: no windows, other lengths, or token ids unknown to the model.
    """
    texts = list(windows)
    if not texts:
        raise ClearheadError("no windows to measure on: give at least one")
    if other := [len(window) for window in texts if window.shape != (length,)]:
        raise ClearheadError(f"length is {length}, but the windows have {other[0]}")
    if reason := lack_of_positions(model, len(prefix) + length):
        return Perplexity(reason=reason)
    settings: dict[str, Any] = {"length": length, "stride": length, "prefix": prefix}
    settings |= {"batch_tokens": batch_size * length, "tokenizer": tokenizer}
    try:
        parts = [one.loss for one in sliding(model, texts, **settings) if len(one.loss)]
    except (ClearheadError, IndexError) as error:  # a limit that only the model knows
        if length <= getattr(model.config, "max_position_embeddings", length):
            raise
        return Perplexity(reason=str(error))
    if not parts:
        return Perplexity(reason="no window holds a token that another of its document foretells")
    sums, count = [float(part.sum()) for part in parts], sum(map(len, parts))
    loss = math.fsum(sums) / count
    if not math.isfinite(perplexity_of(loss)):
        reason = f"the loss is {loss}, so there is no perplexity: {NOT_FINITE}"
    means = tuple(total / len(part) for total, part in zip(sums, parts, strict=True))
    return Perplexity(tokens=count, loss=loss, reason=reason or None, by_window=means)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Difference of two models on the same windows.

    Attributes:
        tokens: predicted tokens, all but the first of each window.
        perplexity, perplexity_before: of the second model, and of the first.
        divergence: KL(first ‖ second), nats a token.
        largest: the largest difference of two logits.
        relative: ‖difference of all logits‖ / ‖the first model's logits‖, Euclidean.
    """

    tokens: int
    perplexity: float
    perplexity_before: float
    divergence: float
    largest: float
    relative: float


def distance(before: Any, after: Any, windows: Iterable[Tensor]) -> Distance:
    """Compare two models, each in its own dtype; probabilities in float32, sums in float64.

    Windows are int64 [length]. Logits are computed in parts of a window where `Losses` can do so.
    """
    tokens, largest, sums = 0, 0.0, torch.zeros(5, dtype=torch.float64)
    with evaluating(before), evaluating(after):
        one_of, other_of = Losses(before), Losses(after)
        for ids_1T in batches(before, windows, 1):
            if ids_1T.shape[1] == 1:
                raise ClearheadError(
                    "windows of 1 token have no next token to compare: give longer ones, to a "
                    "model with max_position_embeddings of at least 2"
                )
            targets = ids_1T[0, 1:]
            for one, other in zip(one_of.logits(ids_1T), other_of.logits(ids_1T), strict=True):
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


def lengths(
    model: Any,
    corpus: Corpus,
    *,
    lengths: Sequence[int],
    tokens: int,
    documents_apart: bool = False,
) -> list[dict[str, Any]]:
    """Loss and perplexity on the validation text, cut into windows of each length.

    All lengths read the same number of tokens: `tokens`, or all that the corpus has, rounded down
    to a whole number of the longest windows. It is the same text where each length divides the
    longest and there is one source. With `documents_apart` windows are read as in training with
    document masks (`tokenizer` of `sliding`).

    Returns:
        Payloads of "measure" records: "loss" and "perplexity" with "length", "split" and
        "predicted_tokens"; the value None with a "reason" where the model or the text is too short.
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
            settings: dict[str, Any] = {"length": size, "batch_size": max(1, BATCH // size)}
            settings |= {"tokenizer": corpus.tokenizer if documents_apart else None}
            one = perplexity(model, texts, **settings)
        line = {"split": "validation", "length": size, "predicted_tokens": one.tokens}
        line |= {} if one.reason is None else {"reason": one.reason}
        values = {"loss": one.loss, "perplexity": one.perplexity}
        lines += [{"metric": name, "value": value, **line} for name, value in values.items()]
    return lines
