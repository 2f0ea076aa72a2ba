"""Multi-query associative recall (Arora et al., arXiv 2312.04927), in words.

A list of pairs, filler up to the length, and some of the pairs again: after each key the list tells
its value. Scored by teacher forcing: whether each token of the value is the likeliest, given the
earlier pairs as they are.
"""

from itertools import accumulate
from statistics import fmean
from typing import ClassVar

from clearhead.data.retrieval import listing, pairs, sentence
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.options import RecallOptions
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Cell, Subject
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line

WORDS = 8  # of the shortest sentence of filler, about


class RecallTask(RecallOptions):
    drawn: ClassVar[bool] = True
    headlines = ("accuracy",)

    def cells(self, subject: Subject) -> list[Cell]:
        grid: list[Cell] = [
            {"length": length, "pairs": number}
            for length in subject.lengths
            for number in self.pairs
        ]
        for cell in grid:
            prompt, answer, _ = self._sample(subject, cell, 0)
            subject.check_length(len(prompt.ids) + len(answer))
        return grid

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        samples = [self._sample(subject, cell, number) for number in range(self.samples)]
        prompts, answers, places = zip(*samples, strict=True)
        replies = subject.reader.ask(prompts, answers)
        by_sample, losses = [], []
        for answer, values in zip(replies, places, strict=True):
            by_sample.append(fmean(all(answer.right[start:stop]) for start, stop in values))
            losses += [sum(answer.loss[start:stop]) for start, stop in values]
        return lines_of(
            self.headlines,
            accuracy=fmean(by_sample),  # of equally many values each
            accuracy_by_item=by_sample,
            answer_loss=fmean(losses),
            trials=len(losses),
        )

    def _sample(
        self, subject: Subject, cell: Cell, number: int
    ) -> tuple[Prompt, tuple[int, ...], list[tuple[int, int]]]:
        """The prompt, the pairs again as the answer, and where in it each value stands."""
        draws = SeededChoices(f"recall {subject.seed} {cell['length']} {cell['pairs']} {number}")
        known = pairs(draws, cell["pairs"], evaluation=True)
        asked = draws.sample(known, min(self.queries, len(known)))
        pieces = [piece for key, value in asked for piece in (f" {key}", f" {value}", ",")]
        filler, length = "", cell["length"]
        while True:
            listed, filling, tail, *parts = subject.ids(
                listing("Pairs", known), filler, " Recall:", *pieces
            )
            ends = [0, *accumulate(map(len, parts))]
            room = length - len(listed) - len(tail) - ends[-1]
            if room < 0:
                raise ClearheadError(
                    f"{cell['pairs']} pairs and {len(asked)} queries take {length - room} "
                    f"tokens, more than the length {length}: give longer lengths or fewer pairs"
                )
            if len(filling) >= room:
                break
            for _ in range(1 + (room - len(filling)) // WORDS):
                filler += f" {sentence(draws, evaluation=True)}"
        answer = tuple(token for part in parts for token in part)
        places = list(zip(ends[1::3], ends[2::3], strict=True))  # of key, value and comma
        return Prompt((*listed, *filling[:room]), tail), answer, places
