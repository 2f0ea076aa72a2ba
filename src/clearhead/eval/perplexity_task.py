"""Perplexity by length: pooled, by document, and by position, with a sliding window."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.eval.options import PerplexityOptions
from clearhead.eval.sliding import perplexity_of, sliding, windows_of
from clearhead.eval.task import EvalTask
from clearhead.measure.documents import Document, at_least
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.runs import Line


class PerplexityTask(EvalTask, PerplexityOptions):
    drawn = False
    headlines = ("perplexity",)

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            next(windows_of(2, length, self._stride(length)))  # refuses impossible strides
            subject.check_length(length)
        self.chosen(subject)
        # The longest decides which documents are read.
        longest = subject.lengths[-1]
        return [{"length": length, "longest": longest} for length in subject.lengths]

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        length = cell["length"]
        chosen = self.chosen(subject)
        sums = np.zeros((len(chosen), 2))
        by_position = np.zeros((length, 2))
        found = sliding(
            subject.model,
            [document.ids for document in chosen],
            length=length,
            stride=self._stride(length),
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        )
        for window in found:
            sums[window.document] += window.loss.sum(), len(window.loss)
            place = slice(window.position, window.position + len(window.loss))
            by_position[place, 0] += window.loss
            by_position[place, 1] += 1
        return {
            "stride": self._stride(length),
            **_of(*sums.sum(0)),
            "left_out": 0 if self.text == "stream" else len(subject.texts.documents) - len(chosen),
            "documents": [
                {"document": document.name, **_of(*row)}
                for document, row in zip(chosen, sums, strict=True)
            ],
            "positions": profile(by_position),
        }

    def chosen(self, subject: Subject) -> list[Document]:
        """The documents that are read, the same for every length."""
        longest, stream = subject.lengths[-1], self.text == "stream"
        if stream and self.document_tokens is not None:
            raise ClearheadError(
                "document-tokens has no effect on --perplexity.text stream: leave it out"
            )
        found = at_least(subject.texts.streams if stream else subject.texts.documents, longest)
        each = self.document_tokens or longest
        if stream:
            each = max(longest, subject.tokens // len(found))
        if each < longest:
            raise ClearheadError(f"document-tokens is {each}: fewer than a window of {longest} has")
        kept: list[Document] = []
        left = subject.tokens
        for document in found:
            ids = document.ids[:each]
            if kept and left < len(ids):
                break
            kept.append(replace(document, ids=ids))
            left -= len(ids)
        return kept

    def _stride(self, length: int) -> int:
        return max(1, length // 2) if self.stride is None else self.stride


def profile(by_position: np.ndarray) -> list[dict[str, Any]]:
    """The loss by place in the window, in bins that grow by √2.

    Args:
        by_position: float64 [length, 2], the sum of the losses at each place and their number.

    Returns:
        For each bin "to", its last place (1 is the second token); "loss", the mean over its tokens;
        "cumulative", the mean over places 1 to "to" of each place's mean loss, every place counting
        alike; "predicted_tokens". A bin without a token is left out.
    """
    losses, counts = by_position.T
    seen = counts > 0
    means = np.divide(losses, counts, out=np.zeros_like(losses), where=seen)
    out, start = [], 1
    for end in _edges(len(by_position)):
        number = counts[start : end + 1].sum()
        if number:
            out.append(
                {
                    "to": end,
                    "loss": float(losses[start : end + 1].sum() / number),
                    "cumulative": float(means[1 : end + 1].sum() / seen[1 : end + 1].sum()),
                    "predicted_tokens": int(number),
                }
            )
        start = end + 1
    return out


def _edges(length: int) -> Sequence[int]:
    """1, 2, 3, 4, 6, 8, 11, 16 … and the last place."""
    powers = {round(2 ** (half / 2)) for half in range(2 * length.bit_length())}
    return sorted({edge for edge in powers if edge < length} | {length - 1})


def _of(total: float, count: float) -> dict[str, Any]:
    loss = total / count
    return {"loss": loss, "perplexity": perplexity_of(loss), "predicted_tokens": int(count)}
