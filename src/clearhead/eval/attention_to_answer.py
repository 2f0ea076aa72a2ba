"""Shares of attention on the answer and on noise (arXiv 2410.05258, table 3).

The last token of a needle prompt, which should find the number, attends to the needle (the answer),
to all other text before the question (noise), and to the begin token and the question itself.
Weights are summed over the span, all heads and all layers, and divided by the sum over all keys,
heads and layers. The paper does not say how it normalises; here the sums are of |weights|, so that
of a difference of maps, too, each share is between 0 and 1.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.data.seeded_choices import SeededChoices
from clearhead.eval.needles import Haystack, haystack
from clearhead.eval.options import AllocationOptions
from clearhead.eval.task import by_depth, check_count
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.models.inspection import evaluating, finite
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line


class AllocationTask(AllocationOptions):
    drawn: ClassVar[bool] = True
    headlines = ("answer_share", "noise_share")

    def cells(self, subject: Subject) -> list[Cell]:
        check_count(samples=self.samples)
        cells = by_depth(subject.lengths, self.depths)
        for length in subject.lengths:
            self._haystack(subject, {"length": length, "depth": 0.0}, 0)
            subject.check_length(length)
        return cells

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> list[Line]:
        weights = torch.zeros(3, dtype=torch.float64)
        for sample in range(self.samples):
            stack = self._haystack(subject, cell, sample)
            (prompt,) = stack.prompts
            weights += last_row(subject, prompt, _spans(stack, prompt, len(subject.begin)))
            advanced(1)
        answer, noise, _ = (weights / weights.sum()).tolist()
        return lines_of(
            self.headlines, answer_share=answer, noise_share=noise, samples=self.samples
        )

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> Haystack:
        label = f"allocation {subject.seed} {cell['length']} {sample}"
        return haystack(subject, SeededChoices(label), needles=1, queries=1, **cell)


def last_row(subject: Subject, prompt: Prompt, spans_3S: Tensor) -> Tensor:
    """Absolute attention of a prompt's last token, summed over heads and layers.

    All tokens of the prompt but the last are read first; only the last is observed.

    Args:
        spans_3S: bool, for each of the spans the keys in it.

    Returns:
        Float64 [3], over the spans, of the map that multiplies the values.
    """
    last_row = _LastRow(spans_3S)
    with evaluating(subject.model):
        batch = subject.reader.read([prompt])
        with observe(subject.model, attention=[ByTile(weights=[last_row])]):
            finite(subject.reader.forward(batch.unread, batch.cache)[0])
    return last_row.sums


class _LastRow:
    def __init__(self, spans_3S: Tensor) -> None:
        self._spans_S3 = spans_3S.double().T
        self.sums = torch.zeros(3, dtype=torch.float64)

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.start + tile.visible.shape[2] < call.q.shape[2]:
            return
        *_, effective = tile.maps  # what multiplies the values comes last
        row_HS = effective.weights[0, :, -1].double().cpu()
        self.sums += row_HS.abs().sum(0) @ self._spans_S3

    def measures(self) -> list[dict[str, Any]]:
        return []


def _spans(stack: Haystack, prompt: Prompt, begin: int) -> Tensor:
    answer_S = torch.zeros(len(prompt.ids), dtype=torch.bool)
    start, stop = stack.spans[stack.asked[0].city]
    answer_S[start:stop] = True
    other_S = torch.zeros_like(answer_S)
    other_S[:begin] = True
    other_S[len(prompt.context) :] = True
    return torch.stack([answer_S, ~(answer_S | other_S), other_S])
