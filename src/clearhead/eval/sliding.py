"""Sliding-window losses of whole documents (Press et al., arXiv 2108.12409, appendix B).

A window of `length` tokens moves on by `stride`. The first window of a document predicts all its
tokens but the first; each later one predicts the tokens that no window before it has, at most
`stride`, with at least length − stride tokens of context (one less where stride = length: then a
window's first token is predicted by nothing, and left out). The last window may be shorter.

What can be reused: two windows with different left edges share no state above the first layer's
projections, since every hidden state has looked back to its own window's edge. So with a stride
below the length each window is computed afresh, whatever the kind of position, and what is saved
is the head on the tokens that are not scored. Windows with one left edge share everything: the
losses of all contexts growing from the start of a document to `length` come out of its first
window, in one pass (`Scored.position` tells them apart).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from clearhead.errors import ClearheadError
from clearhead.eval.token_losses import Losses
from clearhead.models.inspection import batches, evaluating


class Window(NamedTuple):
    """Tokens `start` to `stop` of a document, of which those from `first` on are predicted."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The predicted tokens of one window.

    Attributes:
        document: which one.
        start: the window's first token in it.
        position: the first predicted token's place in the window; the others follow.
        loss: nats, float64 [tokens].
    """

    document: int
    start: int
    position: int
    loss: np.ndarray


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
    documents: Sequence[np.ndarray],
    *,
    length: int,
    stride: int,
    batch_tokens: int,
    advanced: Callable[[int], None] | None = None,
) -> Iterator[Scored]:
    """The loss of every predicted token of every document.

    Windows of the same shape run together, whichever document they are of; results are therefore
    not in order, and each says where it belongs.

    Args:
        documents: token ids, 1-D.
        batch_tokens: tokens run together; it changes speed and memory, not the results.
        advanced: called with the number of windows just done.

    Raises:
        ClearheadError: as `windows_of`, and for token ids or lengths unknown to the model.
    """
    losses = Losses(model)
    rows = max(1, batch_tokens // length)
    waiting: dict[tuple[int, int], list[tuple[int, Window]]] = {}

    def run(group: list[tuple[int, Window]]) -> Iterator[Scored]:
        cut = (documents[number][window.start : window.stop] for number, window in group)
        texts = [torch.from_numpy(ids.astype(np.int64)) for ids in cut]
        with evaluating(model):  # inside: the mode must not leak while the caller has the turn
            (ids_BT,) = batches(model, texts, len(texts))
            window = group[0][1]
            loss_BN = losses(ids_BT, window.first - window.start).double().cpu().numpy()
        for (number, window), loss in zip(group, loss_BN, strict=True):
            place = window.first - window.start
            yield Scored(document=number, start=window.start, position=place, loss=loss)
        if advanced is not None:
            advanced(len(group))

    for number, document in enumerate(documents):
        for window in windows_of(len(document), length, stride):
            shape = (window.stop - window.start, window.first - window.start)
            group = waiting.setdefault(shape, [])
            group.append((number, window))
            if len(group) == rows:
                yield from run(waiting.pop(shape))
    for group in waiting.values():
        yield from run(group)
