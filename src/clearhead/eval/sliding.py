"""Losses and perplexity of causal language models, by windows that move over texts by a stride.

A window of `length` tokens moves on by `stride` (Press et al., arXiv 2108.12409, appendix B). The
first window of a document predicts all its tokens but the first; each later one predicts the tokens
that no window before it has, at most `stride`, with at least length − stride tokens of context (one
less where stride = length: then a window's first token is predicted by nothing, and left out). The
last window may be shorter.

Two windows with different left edges share no state above the first layer's projections, so with a
stride below the length each is computed afresh. The losses of all contexts that grow from the start
of a document to `length` come out of its first window (`Scored.position` tells them apart).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.data import Corpus, windows
from clearhead.data.batches import IGNORED, document_inputs, document_starts
from clearhead.errors import NOT_FINITE, ClearheadError
from clearhead.eval.token_losses import Losses, perplexity_of
from clearhead.models.inspection import batches, evaluating, lack_of_positions

BATCH = 4096  # tokens run together by `lengths`


class Window(NamedTuple):
    """Tokens `start` to `stop` of a document, of which those from `first` on are predicted."""

    start: int
    stop: int
    first: int


class Scored(NamedTuple):
    """The predicted tokens of one window.

    Attributes:
        document: which one.
        start: the window's first token in it.
        position: the first predicted token's place in the window; the others follow.
        loss: nats, float64 [tokens]; 0 of a token that does not count.
        counted: bool [tokens].
    """

    document: int
    start: int
    position: int
    loss: np.ndarray
    counted: np.ndarray


def windows_of(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """The windows of a document of `tokens` tokens.

    Raises:
        ClearheadError: a length below 2, or a stride below 1 or above the length.
    """
    if length < 2:
        raise ClearheadError(f"length is {length}: predicting a token takes at least 2")
    if not 1 <= stride <= length:
        raise ClearheadError(
            f"stride is {stride}: it is from 1 to the window's length, {length}; "
            "a longer one would leave tokens out"
        )
    done = 1
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens)
        first = max(done, start + 1)
        if first < stop:
            yield Window(start, stop, first)
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
    advanced: Callable[[int], None] | None = None,
) -> Iterator[Scored]:
    """The loss of every predicted token of every document.

    Windows of the same shape run together, whichever document they are of; results are therefore
    not in order, and each says where it belongs. The model runs in its own dtype, without autocast,
    in evaluation mode; its mode is then as it was.

    Args:
        documents: token ids, 1-D integers of numpy or torch.
        batch_tokens: tokens run together; it changes speed and memory, not the results.
        prefix: tokens read before every window, and not predicted.
        tokenizer: tells where documents begin. Where it is given, those of a window are read as
            training with document masks reads them: none sees another, positions begin again in
            each, and its first token does not count. For models that take document_ids.
        advanced: called with the number of windows just done.

    Raises:
        ClearheadError: as `windows_of`, and for token ids or lengths unknown to the model.
    """
    losses = Losses(model)
    rows = max(1, batch_tokens // length)
    waiting: dict[tuple[int, int], list[tuple[int, Window, Tensor]]] = {}

    def run(group: list[tuple[int, Window, Tensor]]) -> list[Scored]:
        place = group[0][1].first - group[0][1].start
        with evaluating(model):  # inside: the mode must not leak while the caller has the turn
            (ids_BT,) = batches(model, (ids for _, _, ids in group), len(group))
            counted_BN = torch.ones_like(ids_BT[:, place:], dtype=torch.bool)
            inputs: dict[str, Tensor] = {}
            if tokenizer is not None:
                inputs = document_inputs(ids_BT, document_starts(ids_BT, tokenizer))
                counted_BN = inputs.pop("labels")[:, place:] != IGNORED
            before_BP = ids_BT.new_tensor(prefix).expand(len(ids_BT), -1)
            loss_BN = losses(torch.cat([before_BP, ids_BT], 1), len(prefix) + place, **inputs)
            loss_BN = loss_BN.double().masked_fill(~counted_BN, 0.0)
        if advanced is not None:
            advanced(len(group))
        numbers = zip(group, loss_BN.cpu().numpy(), counted_BN.cpu().numpy(), strict=True)
        return [Scored(n, window.start, place, *rest) for (n, window, _), *rest in numbers]

    for number, document in enumerate(documents):
        for window in windows_of(len(document), length, stride):
            shape = (window.stop - window.start, window.first - window.start)
            group = waiting.setdefault(shape, [])
            ids = np.asarray(document[window.start : window.stop], dtype=np.int64)
            group.append((number, window, torch.from_numpy(ids)))
            if len(group) == rows:
                yield from run(waiting.pop(shape))
    for group in waiting.values():
        yield from run(group)


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
        length: beyond the learned positions of a model the result has a reason instead of a value.
        batch_size: windows run together.
        tokenizer: as of `sliding`. prefix: tokens before every window, as of `sliding`.

    Raises:
        ClearheadError: no windows, other lengths, or token ids unknown to the model.
    """

    def cannot(reason: str) -> Perplexity:
        return Perplexity(length=length, tokens=0, loss=None, perplexity=None, reason=reason)

    texts = list(windows)
    if other := [len(window) for window in texts if window.shape != (length,)]:
        raise ClearheadError(f"length is {length}, but the windows have {other[0]}")
    if reason := lack_of_positions(model, len(prefix) + length):
        return cannot(reason)
    scored = sliding(
        model,
        texts,
        length=length,
        stride=length,
        batch_tokens=batch_size * length,
        prefix=prefix,
        tokenizer=tokenizer,
    )
    try:
        sums = [(float(one.loss.sum()), int(one.counted.sum())) for one in scored]
    except (ClearheadError, IndexError) as error:
        if length <= getattr(model.config, "max_position_embeddings", length):
            raise
        return cannot(str(error))
    if not sums:
        raise ClearheadError("no windows to measure on: give at least one")
    count = sum(counted for _, counted in sums)
    if not count:
        return cannot("no window holds a token that another of its document foretells")
    loss = math.fsum(total for total, _ in sums) / count
    return Perplexity(
        length=length,
        tokens=count,
        loss=loss,
        perplexity=perplexity_of(loss),
        by_window=tuple(total / counted for total, counted in sums if counted),
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
        loss, value, read = None, None, {"predicted_tokens": 0}
        reason: str | None = (
            f"{tokens:,} tokens of {sum(held):,} in the validation split hold no window of "
            f"{length:,}"
        )
        if length in fitting:
            text = windows(corpus, length=length, count=budget // length)
            size = max(1, BATCH // length)
            found = perplexity(model, text, length=length, batch_size=size, tokenizer=tokenizer)
            loss, value, reason = found.loss, found.perplexity, found.problem
            read = {"predicted_tokens": found.tokens}
        line = {"split": "validation", "length": length, **read}
        line |= {} if reason is None else {"reason": reason}
        out.append({"metric": "loss", "value": loss, **line})
        out.append({"metric": "perplexity", "value": value, **line})
    return out
