"""Needles among generated sentences (arXiv 2410.05258): retrieval, and attention to the answer.

Retrieval (section 3.4, after LWM and Gemini 1.5): N cities have magic numbers in a text; R of them
are asked for. The papers do not say how the R answers are asked for and placed: here each is asked
by itself after the same context (which is read once), and the R needles stand together at the
depth.

Attention (table 3): the last token of a prompt, which should find the number, attends to the needle
(the answer), to all other text before the question (noise), and to the begin token and the question
itself. Weights are summed over the span, all heads and all layers, and divided by the sum over all
keys, heads and layers. The paper does not say how it normalises; here the sums are of |weights|, so
that of a difference of maps, too, each share is between 0 and 1.
"""

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.data.retrieval import Fact, facts, sentence
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.options import AllocationOptions, NeedlesOptions, parted
from clearhead.eval.passkey import DIGITS, by_depth, scores
from clearhead.measure.answers import Ids, Prompt
from clearhead.measure.task import Cell, Subject
from clearhead.models.inspection import evaluating, finite
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line


class NeedlesTask(NeedlesOptions):
    drawn: ClassVar[bool] = True
    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        cells: list[Cell] = [
            {**cell, "needles": needles, "queries": queries}
            for needles, queries in map(_size, parted(self.grid))
            for cell in by_depth(subject.lengths, self.depths)
        ]
        for cell in cells:
            if cell["depth"] == max(self.depths):
                self._haystack(subject, cell, 0)
                subject.check_length(cell["length"] + self.new_tokens)
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        stacks = [self._haystack(subject, cell, sample) for sample in range(self.samples)]
        prompts = [prompt for stack in stacks for prompt in stack.prompts]
        numbers = [fact.number for stack in stacks for fact in stack.asked]
        answers = [answer for stack in stacks for _, answer in stack.questions]
        found = subject.reader.ask(prompts, answers, new_tokens=self.new_tokens)
        by_query = scores(subject, found, numbers, [0] * len(found), cell["queries"])
        return lines_of(self.headlines, **by_query, samples=self.samples, trials=len(found))

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> "Haystack":
        # The same sample at every depth has the same filler and facts.
        label = f"needles {subject.seed} {cell['length']} {cell['needles']} {sample}"
        return haystack(subject, SeededChoices(label), **cell)


class AllocationTask(AllocationOptions):
    drawn: ClassVar[bool] = True
    headlines = ("answer_share", "noise_share")

    def cells(self, subject: Subject) -> list[Cell]:
        cells = by_depth(subject.lengths, self.depths)
        for length in subject.lengths:
            self._haystack(subject, {"length": length, "depth": 0.0}, 0)
            subject.check_length(length)
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        weights = torch.zeros(3, dtype=torch.float64)
        for sample in range(self.samples):
            stack = self._haystack(subject, cell, sample)
            (prompt,) = stack.prompts
            weights += last_row(subject, prompt, _spans(stack, prompt, len(subject.begin)))
        answer, noise, _ = (weights / weights.sum()).tolist()
        return lines_of(
            self.headlines, answer_share=answer, noise_share=noise, samples=self.samples
        )

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> "Haystack":
        label = f"allocation {subject.seed} {cell['length']} {sample}"
        return haystack(subject, SeededChoices(label), needles=1, queries=1, **cell)


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """A context with needles in it, and what is asked.

    Attributes:
        context: token ids, the begin token first where there is one.
        asked: the facts that are asked for. questions: of each, its question and answer as tokens.
        spans: where each stated needle stands in the context, (start, stop), by city.
    """

    context: Ids
    asked: tuple[Fact, ...]
    questions: tuple[tuple[Ids, Ids], ...]
    spans: dict[str, tuple[int, int]]

    @property
    def prompts(self) -> list[Prompt]:
        """One prompt for each fact asked for."""
        return [Prompt(self.context, question) for question, _ in self.questions]


def haystack(
    subject: Subject, draws: SeededChoices, *, length: int, depth: float, needles: int, queries: int
) -> Haystack:
    """Needles among sentences: context and longest question have exactly `length` tokens.

    The needles that are asked for stand together at `depth` (a share of the filler before them, to
    the nearest sentence); each other needle stands at a random place of its own.

    Raises:
        ClearheadError: needles that do not fit the length.
    """
    hidden = facts(draws, needles, DIGITS, evaluation=True)
    asked = tuple(hidden[:queries])
    pieces = [subject.ids("a", f"\n{one.question}", f" {one.number}") for one in asked]
    questions = tuple((question, answer) for _, question, answer in pieces)
    statements = {fact.city: _sentence(subject, fact.statement) for fact in hidden}
    tail = max(len(question) for question, _ in questions)
    needed = len(subject.begin) + sum(map(len, statements.values())) + tail
    room = length - needed
    if room < 0:
        raise ClearheadError(
            f"{needles} needles and a question take {needed} tokens, more than the length "
            f"{length}: give longer lengths or fewer needles"
        )
    chunks: list[Ids] = []
    while (left := room - sum(map(len, chunks))) > 0:
        chunks.append(_sentence(subject, sentence(draws, evaluation=True))[:left])
    ends = [0, *accumulate(map(len, chunks))]
    nearest = min(range(len(ends)), key=lambda gap: abs(ends[gap] - depth * room))
    places: dict[int, list[Fact]] = {nearest: list(asked)}
    for fact in hidden[queries:]:
        places.setdefault(draws.below(len(ends)), []).append(fact)
    context, spans = list(subject.begin), {}
    for index, chunk in enumerate([*chunks, ()]):
        for fact in places.get(index, ()):
            ids = statements[fact.city]
            spans[fact.city] = (len(context), len(context) + len(ids))
            context += ids
        context += chunk
    return Haystack(context=tuple(context), asked=asked, questions=questions, spans=spans)


def _sentence(subject: Subject, sentence: str) -> Ids:
    """A sentence's tokens as they are after another one."""
    return subject.ids(".", f" {sentence}")[1]


def _size(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", word)
    if match is None:
        raise ClearheadError(f"grid {word!r} is not NxR: for example 4x2, 2 of 4 needles asked for")
    needles, queries = int(match[1]), int(match[2])
    if not 1 <= queries <= needles:
        raise ClearheadError(f"grid {word!r}: ask for 1 to {needles} of the {needles} needles")
    return needles, queries


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
