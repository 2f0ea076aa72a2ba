"""Perplexity by length, pooled and by document, with a sliding window."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.eval.options import PerplexityOptions
from clearhead.eval.sliding import perplexity_of, sliding, windows_of
from clearhead.measure.documents import Document, at_least
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line


class PerplexityTask(PerplexityOptions):
    drawn: ClassVar[bool] = False
    headlines = ("perplexity",)

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            next(windows_of(2, length, self._stride(length)))  # refuses impossible strides
            subject.check_length(length)
        self.chosen(subject)
        # The longest decides which documents are read.
        longest = subject.lengths[-1]
        return [{"length": length, "longest": longest} for length in subject.lengths]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> list[Line]:
        length = cell["length"]
        chosen = self.chosen(subject)
        sums = np.zeros((len(chosen), 2))
        scored = sliding(
            subject.model,
            [document.ids for document in chosen],
            length=length,
            stride=self._stride(length),
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        )
        for window in scored:
            sums[window.document] += window.loss.sum(), len(window.loss)
        return lines_of(
            self.headlines,
            stride=self._stride(length),
            **_of(*sums.sum(0)),
            left_out=0 if self.text == "stream" else len(subject.texts.documents) - len(chosen),
            documents=[
                {"document": document.name, **_of(*row)}
                for document, row in zip(chosen, sums, strict=True)
            ],
        )

    def chosen(self, subject: Subject) -> list[Document]:
        """The documents that are read, the same for every length."""
        longest, stream = subject.lengths[-1], self.text == "stream"
        if stream and self.document_tokens is not None:
            raise ClearheadError(
                "document-tokens has no effect on --perplexity.text stream: leave it out"
            )
        documents = at_least(subject.texts.streams if stream else subject.texts.documents, longest)
        each = self.document_tokens or longest
        if stream:
            each = max(longest, subject.tokens // len(documents))
        if each < longest:
            raise ClearheadError(f"document-tokens is {each}: give at least one window, {longest}")
        selected: list[Document] = []
        left = subject.tokens
        for document in documents:
            ids = document.ids[:each]
            if selected and left < len(ids):
                break
            selected.append(replace(document, ids=ids))
            left -= len(ids)
        return selected

    def _stride(self, length: int) -> int:
        return max(1, length // 2) if self.stride is None else self.stride


def _of(total: float, count: float) -> dict[str, Any]:
    loss = total / count
    return {"loss": loss, "perplexity": perplexity_of(loss), "predicted_tokens": int(count)}
