"""Needles in a text: city–number sentences between the sentences of filler, at token precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from clearhead.data.retrieval import Fact, facts, sentence
from clearhead.data.seeded_choices import SeededChoices
from clearhead.data.synthetic import is_synthetic
from clearhead.errors import ClearheadError
from clearhead.eval.options import Filler
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Subject

Ids = tuple[int, ...]
_ENDS = (".", "!", "?", "\n", '."', '!"', '?"', ".”", "!”", "?”")


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """A context with needles in it, and what is asked.

    Attributes:
        context: token ids, the begin token first where there is one.
        asked: the facts that are asked for.
        spans: where each stated needle stands in the context, (start, stop), by city.
    """

    context: Ids
    asked: tuple[Fact, ...]
    spans: dict[str, tuple[int, int]]

    def prompts(self, subject: Subject) -> list[Prompt]:
        """One prompt for each fact asked for."""
        return [Prompt(self.context, question_of(subject, fact)[0]) for fact in self.asked]


def haystack(
    subject: Subject,
    draws: SeededChoices,
    *,
    length: int,
    depth: float,
    needles: int,
    queries: int,
    digits: int,
    filler: Filler,
) -> Haystack:
    """Filler of exactly the length that is left beside needles and question.

    The needles that are asked for stand together at `depth` (a share of the filler before them, to
    the nearest sentence); the others, each at a place of its own, drawn.

    Raises:
        ClearheadError: needles that do not fit the length, or no text long enough.
    """
    stated = facts(draws, needles, digits, evaluation=True)
    asked = tuple(stated[:queries])
    statements = {fact.city: _sentence(subject, fact.statement) for fact in stated}
    tails = max(len(question_of(subject, fact)[0]) for fact in asked)
    needed = len(subject.begin) + sum(map(len, statements.values())) + tails
    room = length - needed
    if room < 0:
        raise ClearheadError(
            f"{needles} needles and a question take {needed} tokens, more than the length "
            f"{length}: give longer lengths or fewer needles"
        )
    chunks = (
        _sentences(subject, draws, room) if filler == "sentences" else _text(subject, draws, room)
    )
    places: dict[int, list[Fact]] = {}
    places.setdefault(_nearest(chunks, depth * room), []).extend(asked)
    for fact in stated[queries:]:
        places.setdefault(draws.below(len(chunks) + 1), []).append(fact)
    context, spans = list(subject.begin), {}
    for index in range(len(chunks) + 1):
        for fact in places.get(index, ()):
            ids = statements[fact.city]
            spans[fact.city] = (len(context), len(context) + len(ids))
            context += ids
        context += chunks[index] if index < len(chunks) else ()
    return Haystack(context=tuple(context), asked=asked, spans=spans)


def _sentence(subject: Subject, sentence: str) -> Ids:
    """A sentence's tokens as they are after another one."""
    return subject.ids(".", f" {sentence}")[1]


def question_of(subject: Subject, fact: Fact) -> tuple[Ids, Ids]:
    """The tokens of question and answer as they are after filler, which is cut anywhere."""
    _, question, answer = subject.ids("a", f"\n{fact.question}", f" {fact.number}")
    return question, answer


def _nearest(chunks: Sequence[Ids], target: float) -> int:
    """The gap between chunks that is nearest to `target` tokens from the start."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk))
    return min(range(len(ends)), key=lambda gap: abs(ends[gap] - target))


def _sentences(subject: Subject, draws: SeededChoices, room: int) -> list[Ids]:
    chunks: list[Ids] = []
    while room > 0:
        chunk = _sentence(subject, sentence(draws, evaluation=True))[:room]
        chunks.append(chunk)
        room -= len(chunk)
    return chunks


def _text(subject: Subject, draws: SeededChoices, room: int) -> list[Ids]:
    """A stretch of some document, cut after its sentences; synthetic ones have needles already."""
    if not room:
        return []
    start_of = 1 if subject.begin else 0
    real = [document for document in subject.texts.documents if not is_synthetic(document.spec)]
    long = [document for document in real if len(document) - start_of >= room]
    if not long:
        longest = max(map(len, real), default=0)
        raise ClearheadError(
            f"filler of {room:,} tokens is more than any document has (the longest: {longest:,}): "
            "give longer texts, shorter lengths, or made sentences, which need no text "
            "(--needles.filler sentences, --allocation.filler sentences)"
        )
    document = draws.choice(long)
    start = start_of + draws.below(len(document) - start_of - room + 1)
    ids = document.ids[start : start + room].tolist()
    ends = _ends(subject.tokenizer)
    chunks, begun = [], 0
    for index, token in enumerate(ids, start=1):
        if token in ends or index == len(ids):
            chunks.append(tuple(ids[begun:index]))
            begun = index
    return chunks


@cache
def _ends(tokenizer: Any) -> frozenset[int]:
    """The tokens after which a sentence has ended."""
    ids = sorted(tokenizer.get_vocab().values())
    spelt = tokenizer.batch_decode([[token] for token in ids])
    return frozenset(i for i, text in zip(ids, spelt, strict=True) if text.endswith(_ENDS))
