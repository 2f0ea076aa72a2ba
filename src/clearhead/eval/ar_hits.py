"""Loss at AR-hits, tokens that could be looked up in the context, and at all others.

An AR-hit (associative recall; Arora et al., arXiv 2312.04927) is the last token of an n-gram that
stood in the same window before. As in arXiv 2410.05258 (table 6) all of them count; Zoology leaves
out n-grams that are frequent in the training text.
"""

from typing import ClassVar

import numpy as np
import torch

from clearhead.errors import ClearheadError
from clearhead.eval.options import HitsOptions
from clearhead.eval.perplexity_task import PerplexityTask
from clearhead.eval.sliding import sliding
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.models.inspection import opened
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line


class HitsTask(HitsOptions):
    drawn: ClassVar[bool] = False
    headlines = ("ar_hit_loss", "others_loss")

    def cells(self, subject: Subject) -> list[Cell]:
        if self.ngram < 2:
            raise ClearheadError(f"ngram is {self.ngram}: give 2 or more, a token and those before")
        if self.ngram >= subject.lengths[0]:
            raise ClearheadError(
                f"ngram is {self.ngram}: none recurs in a window of {subject.lengths[0]}: lower it"
            )
        return _text().cells(subject)

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> list[Line]:
        length = cell["length"]
        texts = [document.ids for document in _text().chosen(subject)]
        sums = {True: np.zeros(2), False: np.zeros(2)}
        for window in sliding(
            subject.model,
            texts,
            length=length,
            stride=length,
            batch_tokens=subject.batch_tokens,
            advanced=advanced,
        ):
            ids = texts[window.document][window.start : window.start + length]
            read = opened(subject.model, torch.from_numpy(ids.astype(np.int64)))
            hit = hits(read.numpy(), self.ngram)
            for kind, total in sums.items():
                losses = window.loss[hit[window.position :] == kind]
                total += losses.sum(), len(losses)
        (hit_sum, hit_count), (other_sum, other_count) = sums[True], sums[False]
        return lines_of(
            self.headlines,
            ar_hit_loss=hit_sum / hit_count if hit_count else None,
            others_loss=other_sum / other_count if other_count else None,
            loss=(hit_sum + other_sum) / (hit_count + other_count),
            ar_hits=int(hit_count),
            predicted_tokens=int(hit_count + other_count),
        )


def hits(ids: np.ndarray, ngram: int) -> np.ndarray:
    """Mask of tokens that end an n-gram which also ended earlier in these ids, bool [tokens]."""
    recurring = np.zeros(len(ids), dtype=bool)
    seen: set[tuple[int, ...]] = set()
    tokens = ids.tolist()
    for end in range(ngram, len(tokens) + 1):
        gram = tuple(tokens[end - ngram : end])
        recurring[end - 1] = gram in seen
        seen.add(gram)
    return recurring


def _text() -> PerplexityTask:
    """The task that chooses the windows: each source as one text, as in training."""
    return PerplexityTask(text="stream")
