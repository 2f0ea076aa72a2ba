"""Retrieval from long texts: passkeys, needles and associative recall; attention to the answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from clearhead.data.seeded import SeededChoices
from clearhead.data.synthetic import LANDMARK, PAPER, Fact, facts, keyed, listing, number, sentence
from clearhead.errors import ClearheadError
from clearhead.eval import options
from clearhead.eval.options import parted
from clearhead.measure.answers import Answer, Ids, Prompt, reset_dynamic_rope
from clearhead.measure.sweep import Cell, Subject
from clearhead.models.inspection import evaluating, finite
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import Statistic, observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line

DIGITS = 5  # of a key, and of a magic number
WORDINGS = {"paper": PAPER, "landmark": LANDMARK}


def by_depth(lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """A cell for each length and depth; depths ascend, since cached filler can only grow."""
    return [{"length": length, "depth": depth} for length in lengths for depth in sorted(depths)]


class PasskeyTask(options.PasskeyOptions):
    """A number somewhere in repeated filler, asked for at the end.

    The CoCA paper's prompt (arXiv 2309.08646v3, appendix B.1) or landmark attention's. The CoCA
    paper states neither its scoring rule nor the key's position. Here `accuracy` counts answers
    that contain the key, and `forced` those whose tokens are each the likeliest (teacher forcing
    after the answer's lead).
    """

    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            key = number(SeededChoices("any"), DIGITS, evaluation=True)
            self._prompt(subject, key, length, 0)
            subject.check_length(length + self._new_tokens)
        return by_depth(subject.lengths, self.depths)

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        draws = SeededChoices(f"passkey {subject.seed} {cell['length']} {cell['depth']}")
        keys = [number(draws, DIGITS, evaluation=True) for _ in range(self.trials)]
        prompts, answers, leads = [], [], []
        for key in keys:
            text = self._prompt(subject, key, cell["length"], cell["depth"])
            ids, lead, spelt = subject.ids(text, WORDINGS[self.wording].lead, f" {key}")
            prompts.append(Prompt(ids[:-1], ids[-1:]))
            answers.append((*lead, *spelt))
            leads.append(len(lead))
        replies = subject.reader.ask(prompts, answers, new_tokens=self._new_tokens)
        return lines_of(
            self.headlines,
            **scores(subject, replies, keys, leads),
            trials=self.trials,
            prompt_tokens=fmean(len(prompt.ids) for prompt in prompts),
        )

    @property
    def _new_tokens(self) -> int:
        return self.new_tokens or WORDINGS[self.wording].new_tokens

    def _prompt(self, subject: Subject, key: str, length: int, depth: float) -> str:
        """The prompt of at most `length` tokens, as much filler in it as fits."""
        prompt = WORDINGS[self.wording].prompt

        def tokens(repeats: int) -> int:
            return len(subject.ids(prompt(key, 0, repeats))[0])

        bare, each = tokens(0), tokens(2) - tokens(1)
        if bare > length:
            raise ClearheadError(
                f"a passkey prompt takes {bare} tokens without any filler: more than the "
                f"length {length}; give longer lengths, or leave passkey out"
            )
        repeats = (length - bare) // each
        while repeats and tokens(repeats) > length:
            repeats -= 1
        before = round(depth * repeats)
        return prompt(key, before, repeats - before)


def scores(
    subject: Subject,
    found: Sequence[Answer],
    keys: Sequence[str],
    leads: Sequence[int],
    together: int = 1,
) -> dict[str, Any]:
    """Shares of numbers retrieved, overall and by item (for a standard error over items).

    `leads`: number of tokens before the number in each forced answer; `together`: how many
    consecutive answers belong to one text, which is one item.
    """
    written = [re.findall(r"\d+", subject.decode(answer.written)) for answer in found]
    named = [key in numbers for key, numbers in zip(keys, written, strict=True)]
    right = [answer.right[lead:] for answer, lead in zip(found, leads, strict=True)]
    items = [slice(start, start + together) for start in range(0, len(found), together)]
    return {
        "accuracy": sum(named) / len(found),
        "forced": sum(map(all, right)) / len(found),
        "forced_tokens": fmean(chain(*right)),
        "answer_loss": fmean(sum(a.loss[n:]) for a, n in zip(found, leads, strict=True)),
        "accuracy_by_item": [fmean(named[item]) for item in items],
        "forced_tokens_by_item": [fmean(chain(*right[item])) for item in items],
    }


class NeedlesTask(options.NeedlesOptions):
    """Needles among generated sentences (arXiv 2410.05258, section 3.4, after LWM and Gemini 1.5).

    A text states magic numbers of N cities; R of them are asked for. The papers do not say how
    the R questions are asked and the needles placed: here each question follows the same context
    (read once) by itself, and the R needles are together at the depth.
    """

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
        numbers = [fact.number for stack in stacks for fact in stack.asked]
        answers = [answer for stack in stacks for answer in stack.answers]
        prompts = [prompt for stack in stacks for prompt in stack.prompts]
        found = subject.reader.ask(prompts, answers, new_tokens=self.new_tokens)
        by_query = scores(subject, found, numbers, [0] * len(found), cell["queries"])
        return lines_of(self.headlines, **by_query, samples=self.samples, trials=len(found))

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> "Haystack":
        # The same sample at every depth has the same filler and facts.
        label = f"needles {subject.seed} {cell['length']} {cell['needles']} {sample}"
        return haystack(subject, SeededChoices(label), **cell)


class AllocationTask(options.AllocationOptions):
    """Attention to the answer (arXiv 2410.05258, table 3).

    The last token of a prompt, which should find the number, attends to the needle (the answer), to
    all other text before the question (noise), and to the begin token and the question itself.
    Weights are summed over the span, heads and layers, and divided by the sum over all keys, heads
    and layers. The paper does not say how it normalises; here the sums are of |weights|, so that of
    a difference of maps, too, each share is between 0 and 1.
    """

    headlines = ("answer_share", "noise_share")

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            self._haystack(subject, {"length": length, "depth": 0.0}, 0)
            subject.check_length(length)
        return by_depth(subject.lengths, self.depths)

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        weights = torch.zeros(3, dtype=torch.float64)
        for sample in range(self.samples):
            stack = self._haystack(subject, cell, sample)
            (prompt,), begin = stack.prompts, len(subject.begin)
            place_S = torch.arange(len(prompt.ids))
            start, stop = stack.spans[stack.asked[0].city]
            answer_S = (place_S >= start) & (place_S < stop)
            other_S = (place_S < begin) | (place_S >= len(stack.context))
            spans_3S = torch.stack([answer_S, ~(answer_S | other_S), other_S])
            weights += last_row(subject, prompt, spans_3S)
        answer, noise, _ = (weights / weights.sum()).tolist()
        shares = {"answer_share": answer, "noise_share": noise}
        return lines_of(self.headlines, **shares, samples=self.samples)

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> "Haystack":
        label = f"allocation {subject.seed} {cell['length']} {sample}"
        return haystack(subject, SeededChoices(label), needles=1, queries=1, **cell)


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """A context with needles, and its questions.

    Attributes:
        context: token ids, the begin token first where there is one.
        asked: the facts asked for.
        prompts: one for each of these facts.
        answers: the tokens of their numbers.
        spans: position of each needle in the context, (start, stop), by city.
    """

    context: Ids
    asked: tuple[Fact, ...]
    prompts: tuple[Prompt, ...]
    answers: tuple[Ids, ...]
    spans: dict[str, tuple[int, int]]


def haystack(
    subject: Subject, draws: SeededChoices, *, length: int, depth: float, needles: int, queries: int
) -> Haystack:
    """Needles among sentences: context and longest question have exactly `length` tokens.

    The needles that are asked for are together at `depth` (the share of filler before them, to the
    nearest sentence); every other needle is at a random place of its own.
    """
    hidden = facts(draws, needles, DIGITS, evaluation=True)
    asked = tuple(hidden[:queries])
    pieces = [subject.ids("a", f"\n{one.question}", f" {one.number}") for one in asked]
    _, questions, answers = zip(*pieces, strict=True)
    statements = {fact.city: _sentence(subject, fact.statement) for fact in hidden}
    needed = len(subject.begin) + sum(map(len, statements.values())) + max(map(len, questions))
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
    read = tuple(context)
    prompts = tuple(Prompt(read, question) for question in questions)
    return Haystack(context=read, asked=asked, prompts=prompts, answers=answers, spans=spans)


def _sentence(subject: Subject, sentence: str) -> Ids:
    """A sentence's tokens as they are after another one."""
    return subject.ids(".", f" {sentence}")[1]


def _size(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", word)
    needles, queries = (int(match[1]), int(match[2])) if match else (0, 1)
    if not 1 <= queries <= needles:
        raise ClearheadError(f"grid {word!r} is not NxR: for example 4x2, 2 of 4 needles asked for")
    return needles, queries


def last_row(subject: Subject, prompt: Prompt, spans_3S: Tensor) -> Tensor:
    """Absolute attention of a prompt's last token, summed over heads and layers, float64 [3].

    A sum for each of three spans of keys, bool [3, S], in the map that multiplies the values. All
    tokens of the prompt but the last are read first; only the last is observed.
    """
    last_row = _LastRow(spans_3S)
    with evaluating(subject.model):
        reset_dynamic_rope(subject.model)
        _, unread_BT, cache = subject.reader.read([prompt])
        with observe(subject.model, attention=[ByTile(weights=[last_row])]):
            finite(subject.reader.forward(unread_BT, cache)[0])
    return last_row.sums


class _LastRow(Statistic):
    def __init__(self, spans_3S: Tensor) -> None:
        self._spans_S3 = spans_3S.double().T
        self.sums = torch.zeros(3, dtype=torch.float64)

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.start + tile.visible.shape[2] == call.q.shape[2]:
            *_, effective = tile.maps  # what multiplies the values comes last
            row_HS = effective.weights[0, :, -1].double().cpu()
            self.sums += row_HS.abs().sum(0) @ self._spans_S3


class RecallTask(options.RecallOptions):
    """Multi-query associative recall (Arora et al., arXiv 2312.04927), with words for symbols.

    A list of pairs, filler up to the length, and some of the pairs again: a repeated key's value is
    known from the list. Scored by teacher forcing: whether each token of the value is the likeliest
    given the correct text before it.
    """

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
        known = keyed(draws, cell["pairs"], evaluation=True)
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
            for _ in range(1 + (room - len(filling)) // 8):  # the shortest sentence's, about
                filler += f" {sentence(draws, evaluation=True)}"
        answer = tuple(token for part in parts for token in part)
        places = list(zip(ends[1::3], ends[2::3], strict=True))  # of key, value and comma
        return Prompt((*listed, *filling[:room]), tail), answer, places
