"""Retrieval from long texts: passkeys, needles and associative recall; attention to the answer."""

import re
from collections.abc import Sequence
from itertools import accumulate, chain, product
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from clearhead.data.seeded import SeededChoices
from clearhead.data.synthetic import LANDMARK, PAPER, Fact, facts, keyed, listing, number, sentence
from clearhead.errors import ClearheadError
from clearhead.measure.answers import Answer, Ids, Prompt, reset_dynamic_rope
from clearhead.measure.sweep import Cell, Subject
from clearhead.models.inspection import evaluating, finite
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line
from clearhead.settings import eval as options
from clearhead.settings.eval import parted

DIGITS = 5  # of a key, and of a magic number
WORDINGS = {"paper": PAPER, "landmark": LANDMARK}


def by_depth(lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """A cell for each length and depth; depths ascend, since cached filler can only grow."""
    return [{"length": length, "depth": depth} for length in lengths for depth in sorted(depths)]


class PasskeyTask(options.PasskeyOptions):
    """A number in repeated filler, asked for at the end, by the CoCA paper's prompt (arXiv
    2309.08646v3, appendix B.1) or landmark attention's."""

    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            self._prompt(subject, "12345", length, 0)
            subject.check_length(length + (self.new_tokens or WORDINGS[self.wording].new_tokens))
        return by_depth(subject.lengths, self.depths)

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        draws = SeededChoices(f"passkey {subject.seed} {cell['length']} {cell['depth']}")
        keys = [number(draws, DIGITS, evaluation=True) for _ in range(self.trials)]
        wording, prompts, leads = WORDINGS[self.wording], [], []
        for key in keys:
            text = self._prompt(subject, key, cell["length"], cell["depth"])
            ids, lead, spelt = subject.ids(text, wording.lead, f" {key}")
            prompts.append(Prompt(ids[:-1], ids[-1:], (*lead, *spelt)))
            leads.append(len(lead))
        new_tokens = self.new_tokens or wording.new_tokens
        replies = subject.reader.ask(prompts, new_tokens=new_tokens)
        pairs = zip(replies, leads, strict=True)
        of_keys = [Answer(one.written, one.loss[n:], one.right[n:]) for one, n in pairs]
        by_key = scores(subject, of_keys, keys)
        prompt_tokens = fmean(len(prompt.ids) for prompt in prompts)
        return lines_of(self.headlines, **by_key, trials=self.trials, prompt_tokens=prompt_tokens)

    def _prompt(self, subject: Subject, key: str, length: int, depth: float) -> str:
        """The prompt of at most `length` tokens, as much filler in it as fits."""
        prompt = WORDINGS[self.wording].prompt

        def tokens(repeats: int) -> int:
            return len(subject.ids(prompt(key, 0, repeats))[0])

        bare, each = tokens(0), tokens(2) - tokens(1)
        if bare > length:
            few = f"takes {bare} tokens without any filler: more than the length {length}"
            raise ClearheadError(f"a passkey prompt {few}; give longer lengths")
        repeats = (length - bare) // each
        while repeats and tokens(repeats) > length:
            repeats -= 1
        before = round(depth * repeats)
        return prompt(key, before, repeats - before)


def scores(
    subject: Subject, replies: Sequence[Answer], keys: Sequence[str], together: int = 1
) -> dict[str, Any]:
    """Shares of numbers retrieved, overall and by item (`together` answers of one text): `accuracy`
    of answers that contain the key, `forced` of those whose tokens are each the likeliest."""
    written = [re.findall(r"\d+", subject.decode(answer.written)) for answer in replies]
    named = [key in numbers for key, numbers in zip(keys, written, strict=True)]
    right = [answer.right for answer in replies]
    items = [slice(start, start + together) for start in range(0, len(replies), together)]
    return {
        "accuracy": sum(named) / len(replies),
        "forced": sum(map(all, right)) / len(replies),
        "forced_tokens": fmean(chain(*right)),
        "answer_loss": fmean(sum(answer.loss) for answer in replies),
        "accuracy_by_item": [fmean(named[item]) for item in items],
        "forced_tokens_by_item": [fmean(chain(*right[item])) for item in items],
    }


class NeedlesTask(options.NeedlesOptions):
    """Magic numbers of N cities among generated sentences, R of them asked for, each by itself
    after the same context (arXiv 2410.05258, section 3.4, after LWM and Gemini 1.5)."""

    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        cells: list[Cell] = []
        for word in parted(self.grid):
            match = re.fullmatch(r"(\d+)x(\d+)", word)
            needles, queries = map(int, match.groups()) if match else (0, 1)
            if not 1 <= queries <= needles:
                raise ClearheadError(f"grid {word!r} is not NxR, such as 4x2: 2 of 4 needles")
            size = {"needles": needles, "queries": queries}
            for length in subject.lengths:
                haystack(subject, "any", length=length, depth=0.0, **size)
                subject.check_length(length + self.new_tokens)
            cells += [{**cell, **size} for cell in by_depth(subject.lengths, self.depths)]
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        # The same sample at every depth has the same filler and facts.
        label = f"needles {subject.seed} {cell['length']} {cell['needles']}"
        samples = [haystack(subject, f"{label} {n}", **cell) for n in range(self.samples)]
        prompts, numbers, _ = zip(*chain(*samples), strict=True)
        replies = subject.reader.ask(prompts, new_tokens=self.new_tokens)
        by_query = scores(subject, replies, numbers, together=cell["queries"])
        return lines_of(self.headlines, **by_query, samples=self.samples, trials=len(replies))


class AllocationTask(options.AllocationOptions):
    """Attention of a prompt's last token to the needle (the answer) and to all other text before
    the question (noise), as shares of the sum of |weights| over keys, heads and layers (arXiv
    2410.05258, table 3)."""

    headlines = ("answer_share", "noise_share")

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            haystack(subject, "any", length=length, depth=0.0)
            subject.check_length(length)
        return by_depth(subject.lengths, self.depths)

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        sums_3 = torch.zeros(3, dtype=torch.float64)  # of the answer, all text and all keys
        for sample in range(self.samples):
            label = f"allocation {subject.seed} {cell['length']} {sample}"
            ((prompt, _, place),) = haystack(subject, label, **cell)
            row_S = last_row(subject, prompt)
            parts = row_S[place], row_S[len(subject.begin) : len(prompt.context)], row_S
            sums_3 += torch.stack([part.sum() for part in parts])
        answer, text, _ = (sums_3 / sums_3[2]).tolist()
        shares = {"answer_share": answer, "noise_share": text - answer}
        return lines_of(self.headlines, **shares, samples=self.samples)


def haystack(
    subject: Subject, label: str, *, length: int, depth: float, needles: int = 1, queries: int = 1
) -> list[tuple[Prompt, str, slice]]:
    """Needles among sentences, drawn by the label: of each one asked for a prompt, the number and
    the place in the context. The longest prompt has exactly `length` tokens. Needles asked for are
    together at `depth` (the share of filler before them, to the nearest sentence), every other one
    is at a random place of its own."""
    draws = SeededChoices(label)
    hidden = facts(draws, needles, DIGITS, evaluation=True)
    asked = hidden[:queries]
    pieces = [subject.ids("a", f"\n{one.question}", f" {one.number}") for one in asked]
    _, questions, answers = zip(*pieces, strict=True)

    def spelt(sentence: str) -> Ids:  # as after another sentence
        return subject.ids(".", f" {sentence}")[1]

    statements = {fact.city: spelt(fact.statement) for fact in hidden}
    needed = len(subject.begin) + sum(map(len, statements.values())) + max(map(len, questions))
    room = length - needed
    if room < 0:
        few = f"take {needed} tokens, more than the length {length}: give longer lengths"
        raise ClearheadError(f"{needles} needles and a question {few} or fewer needles")
    chunks: list[Ids] = []
    while (left := room - sum(map(len, chunks))) > 0:
        chunks.append(spelt(sentence(draws, evaluation=True))[:left])
    ends = [0, *accumulate(map(len, chunks))]
    nearest = min(range(len(ends)), key=lambda gap: abs(ends[gap] - depth * room))
    places: dict[int, list[Fact]] = {nearest: list(asked)}
    for fact in hidden[queries:]:
        places.setdefault(draws.below(len(ends)), []).append(fact)
    context, spans = list(subject.begin), dict[str, slice]()
    for index, chunk in enumerate([*chunks, ()]):
        for fact in places.get(index, ()):
            ids = statements[fact.city]
            spans[fact.city] = slice(len(context), len(context) + len(ids))
            context += ids
        context += chunk
    read = tuple(context)
    return [
        (Prompt(read, question, answer), fact.number, spans[fact.city])
        for question, answer, fact in zip(questions, answers, asked, strict=True)
    ]


def last_row(subject: Subject, prompt: Prompt) -> Tensor:
    """Absolute attention of a prompt's last token to each key, in the map that multiplies the
    values, summed over heads and layers: float64 [S]."""
    sums_S = torch.zeros(len(prompt.ids), dtype=torch.float64)

    def add(call: AttentionCall, tile: AttentionTile) -> None:
        if tile.start + tile.visible.shape[2] == call.q.shape[2]:
            *_, effective = tile.maps  # what multiplies the values comes last
            sums_S.add_(effective.weights[0, :, -1].double().cpu().abs().sum(0))

    statistic: Any = SimpleNamespace(observe=add)
    with evaluating(subject.model):
        reset_dynamic_rope(subject.model)
        _, unread_BT, cache = subject.reader.read([prompt])
        with observe(subject.model, attention=[ByTile(weights=[statistic])]):
            finite(subject.reader.forward(unread_BT, cache)[0])
    return sums_S


class RecallTask(options.RecallOptions):
    """Multi-query associative recall (Arora et al., arXiv 2312.04927), with words for symbols: a
    list of pairs, filler up to the length, and some of the pairs again, whose values are scored by
    teacher forcing."""

    headlines = ("accuracy",)

    def cells(self, subject: Subject) -> list[Cell]:
        cells: list[Cell] = []
        for length, pairs in product(subject.lengths, self.pairs):
            cells.append({"length": length, "pairs": pairs})
            self._sample(subject, cells[-1], 0)  # refuses pairs without room
            subject.check_length(length)
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        samples = [self._sample(subject, cell, number) for number in range(self.samples)]
        prompts, places = zip(*samples, strict=True)
        replies = subject.reader.ask(prompts)
        by_sample, losses = [], []
        for answer, values in zip(replies, places, strict=True):
            by_sample.append(fmean(all(answer.right[value]) for value in values))
            losses += [sum(answer.loss[value]) for value in values]
        numbers: dict[str, Any] = {"accuracy": fmean(by_sample), "accuracy_by_item": by_sample}
        numbers |= {"answer_loss": fmean(losses), "trials": len(losses)}
        return lines_of(self.headlines, **numbers)

    def _sample(self, subject: Subject, cell: Cell, number: int) -> tuple[Prompt, list[slice]]:
        """The prompt with the pairs again as the answer, and where in it each value stands."""
        draws = SeededChoices(f"recall {subject.seed} {cell['length']} {cell['pairs']} {number}")
        known = keyed(draws, cell["pairs"], evaluation=True)
        asked = draws.sample(known, min(self.queries, len(known)))
        pieces = [piece for key, value in asked for piece in (f" {key}", f" {value}", ",")]
        opening, filler, length = listing("Pairs", known), "", cell["length"]
        while True:
            listed, filling, tail, *parts = subject.ids(opening, filler, " Recall:", *pieces)
            ends = [0, *accumulate(map(len, parts))]
            room = length - len(listed) - len(tail) - ends[-1]
            if room < 0:
                taken = f"{len(known)} pairs and {len(asked)} queries take {length - room} tokens"
                raise ClearheadError(f"{taken}, more than the length {length}: give fewer pairs")
            if len(filling) >= room:
                break
            for _ in range(1 + (room - len(filling)) // 8):  # the shortest sentence's, about
                filler += f" {sentence(draws, evaluation=True)}"
        places = list(map(slice, ends[1::3], ends[2::3]))  # of key, value and comma
        return Prompt((*listed, *filling[:room]), tail, tuple(chain(*parts))), places
