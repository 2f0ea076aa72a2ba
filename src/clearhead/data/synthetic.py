"""Generated retrieval texts: `synthetic:TASK:KEY=VALUE,…`.

Tasks are in `clearhead.data.retrieval` and `backcopy`. A source is a pure function of its own
words, so it has the same documents in every process; keys that evaluations ask for never occur in
it.
"""

from collections.abc import Callable, Iterator, Mapping

from clearhead.data import backcopy, retrieval
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError, choose

PREFIX = "synthetic:"

# What a source takes beside `documents` and `characters`, with the defaults.
PARAMETERS: Mapping[str, Mapping[str, int]] = {
    "passkey": {"digits": 5, "landmark": 0},
    "needle": {"needles": 4, "queries": 2, "digits": 5},
    "recall": {"pairs": 12, "queries": 8, "filler": 0},
    "backcopy": {"words": 64, "triggers": 3, "followers": 4},
}
# 480 characters are about 110 tokens of a vocabulary of 4,096 that has seen some of it, so that a
# document fits a window of 128.
_COMMON = {"documents": 10_000, "characters": 480, "seed": 0}


def is_synthetic(spec: str) -> bool:
    """True if a spec names generated text."""
    return spec.startswith(PREFIX)


def texts(spec: str) -> Iterator[str]:
    """The documents of `synthetic:TASK[:KEY=VALUE,…]`, in order.

    Raises:
        ClearheadError: an unknown task or key, or a value that no document can meet.
    """
    task, _, rest = spec.removeprefix(PREFIX).partition(":")
    choose("synthetic text", task, PARAMETERS)
    values = {**_COMMON, **PARAMETERS[task]}
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
        draws = SeededChoices(f"{label} document {number}")
        yield _WRITERS[task](draws, characters, **values)


def _passkey(draws: SeededChoices, characters: int, *, digits: int, landmark: int) -> str:
    wording = retrieval.LANDMARK if landmark else retrieval.PAPER
    key = retrieval.number(draws, digits)

    def text(before: int, after: int) -> str:
        prompt = wording.prompt(key, before, after)
        return f"{prompt}{wording.lead} {key}."

    room = characters - len(text(0, 0))
    _fits("passkey", room, characters)
    most = room // (len(wording.filler) + 2)
    repeats = draws.below(most + 1)
    before = draws.below(repeats + 1)
    return text(before, repeats - before)


def _needle(
    draws: SeededChoices, characters: int, *, needles: int, queries: int, digits: int
) -> str:
    facts = retrieval.facts(draws, needles, digits)
    asked = draws.sample(facts, min(queries, needles))
    answers = "".join(f"\n{fact.question} {fact.number}." for fact in asked)
    statements = [fact.statement for fact in facts]
    room = characters - len(answers) - sum(len(statement) + 1 for statement in statements)
    _fits("needle", room, characters)
    sentences = _sentences(draws, draws.below(room + 1))
    for statement in statements:
        sentences.insert(draws.below(len(sentences) + 1), statement)
    return " ".join(sentences) + answers


def _recall(draws: SeededChoices, characters: int, *, pairs: int, queries: int, filler: int) -> str:
    found = retrieval.pairs(draws, pairs)
    listed = retrieval.listing("Pairs", found)
    asked = retrieval.listing(" Recall", draws.sample(found, min(queries, pairs)))
    room = characters - len(listed) - len(asked)
    _fits("recall", room, characters)
    between = _sentences(draws, draws.below(room + 1)) if filler else []
    return " ".join([listed, *between]) + asked


def _sentences(draws: SeededChoices, characters: int) -> list[str]:
    """Filler of at most so many characters, a space with each."""
    sentences: list[str] = []
    while (sentence := retrieval.sentence(draws)) and len(sentence) + 1 <= characters:
        sentences.append(sentence)
        characters -= len(sentence) + 1
    return sentences


_WRITERS: Mapping[str, Callable[..., str]] = {
    "passkey": _passkey,
    "needle": _needle,
    "recall": _recall,
    "backcopy": backcopy.text,
}


def _fits(task: str, room: int, characters: int) -> None:
    if room < 0:
        raise ClearheadError(
            f"{PREFIX}{task}: a document needs {-room} characters more than the {characters} "
            f"allowed: raise characters={characters}, or ask for less in it"
        )
