"""Generated texts: `synthetic:TASK:KEY=VALUE,…`.

A source is a pure function of its spec, so it has the same documents in every process; keys of
evaluations (`clearhead.data.retrieval`) never occur in it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from clearhead.data import retrieval
from clearhead.data.seeded import SeededChoices
from clearhead.errors import ClearheadError, choose

PREFIX = "synthetic:"
# 480 characters are about 110 tokens of a vocabulary of 4,096 that has seen some of it, so that a
# document fits a window of 128.
_COMMON = {"documents": 10_000, "characters": 480, "seed": 0}


def is_synthetic(spec: str) -> bool:
    """True if a spec names generated text."""
    return spec.startswith(PREFIX)


def texts(spec: str) -> Iterator[str]:
    """The documents of `synthetic:TASK[:KEY=VALUE,…]`, in order."""
    task, _, rest = spec.removeprefix(PREFIX).partition(":")
    write = _WRITERS[choose("synthetic text", task, _WRITERS)]
    values = _COMMON | (write.__kwdefaults__ or {})
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        choose(f"parameter of {PREFIX}{task}", key, values)
        if not value.isdecimal():
            raise ClearheadError(
                f"data {spec!r}: {key} is {value!r}; give a whole number, for example "
                f"{key}={values[key]}"
            )
        values[key] = int(value)
    documents, characters, seed = (values.pop(key) for key in _COMMON)
    if documents < 2:
        raise ClearheadError(f"data {spec!r}: documents must be at least 2, to hold one out")
    # `filler` came later: documents without it keep the bytes they had.
    options = sorted(pair for pair in values.items() if pair != ("filler", 0))
    label = f"{task} {options} {characters} {seed}"
    for number in range(documents):
        yield write(SeededChoices(f"{label} document {number}"), characters, **values)


def _passkey(draws: SeededChoices, characters: int, *, digits: int = 5, landmark: int = 0) -> str:
    wording = retrieval.LANDMARK if landmark else retrieval.PAPER
    key = retrieval.number(draws, digits)

    def text(before: int, after: int) -> str:
        prompt = wording.prompt(key, before, after)
        return f"{prompt}{wording.lead} {key}."

    room = _room("passkey", characters, text(0, 0))
    repeats = draws.below(room // (len(wording.filler) + 2) + 1)
    before = draws.below(repeats + 1)
    return text(before, repeats - before)


def _needle(
    draws: SeededChoices, characters: int, *, needles: int = 4, queries: int = 2, digits: int = 5
) -> str:
    facts = retrieval.facts(draws, needles, digits)
    asked = draws.sample(facts, min(queries, needles))
    answers = "".join(f"\n{fact.question} {fact.number}." for fact in asked)
    statements = [fact.statement for fact in facts]
    room = _room("needle", characters, answers, *(f"{one} " for one in statements))
    sentences = _sentences(draws, draws.below(room + 1))
    for statement in statements:
        sentences.insert(draws.below(len(sentences) + 1), statement)
    return " ".join(sentences) + answers


def _recall(
    draws: SeededChoices, characters: int, *, pairs: int = 12, queries: int = 8, filler: int = 0
) -> str:
    drawn = retrieval.pairs(draws, pairs)
    listed = retrieval.listing("Pairs", drawn)
    asked = retrieval.listing(" Recall", draws.sample(drawn, min(queries, pairs)))
    room = _room("recall", characters, listed, asked)
    between = _sentences(draws, draws.below(room + 1)) if filler else []
    return " ".join([listed, *between]) + asked


def _backcopy(
    draws: SeededChoices, characters: int, *, words: int = 64, triggers: int = 3, followers: int = 4
) -> str:
    """Random word sequences in which a few trigger words copy (arXiv 2410.13835, section 2).

    After a trigger word comes the word before it; after any other, one of a few that may follow it.
    A head that copies has nothing to do at all other words and, since softmax gives it weight to
    place, places it on the first token: the smallest text known to grow attention sinks.
    """
    following, copying = _bigrams(words, triggers, followers)
    chosen = [draws.choice(VOCABULARY[:words])]
    length = len(chosen[0])
    while True:
        last = chosen[-1]
        copies = last in copying and len(chosen) > 1
        word = chosen[-2] if copies else draws.choice(following[last])
        length += 1 + len(word)
        if length > characters:
            return " ".join(chosen)
        chosen.append(word)


VOCABULARY = (*retrieval.KEYS, *retrieval.VALUES)  # of backcopy, as many as it takes


@cache
def _bigrams(
    words: int, triggers: int, followers: int
) -> tuple[dict[str, list[str]], frozenset[str]]:
    """The words that may follow each, and the trigger words: the same in every document."""
    if not (2 <= words <= len(VOCABULARY) and triggers < words and 0 < followers < words):
        raise ClearheadError(
            f"synthetic:backcopy: words={words}, triggers={triggers}, followers={followers}: give "
            f"2 to {len(VOCABULARY)} words, and fewer triggers and followers than words"
        )
    names = VOCABULARY[:words]
    draws = SeededChoices(f"backcopy {words} {triggers} {followers}")
    copying = frozenset(draws.sample(names, triggers))
    # Nothing follows itself: a copy could not be told from chance.
    others = {name: [each for each in names if each != name] for name in names}
    return {name: draws.sample(others[name], followers) for name in names}, copying


_WRITERS: Mapping[str, Callable[..., str]] = {
    "passkey": _passkey,
    "needle": _needle,
    "recall": _recall,
    "backcopy": _backcopy,
}


def _sentences(draws: SeededChoices, characters: int) -> list[str]:
    """Filler of at most so many characters, a space with each."""
    sentences: list[str] = []
    while (sentence := retrieval.sentence(draws)) and len(sentence) + 1 <= characters:
        sentences.append(sentence)
        characters -= len(sentence) + 1
    return sentences


def _room(task: str, characters: int, *parts: str) -> int:
    """The characters that are left beside the parts of a document."""
    room = characters - sum(map(len, parts))
    if room < 0:
        raise ClearheadError(
            f"{PREFIX}{task}: a document needs {-room} characters more than the {characters} "
            f"allowed: raise characters={characters}, or ask for less in it"
        )
    return room
