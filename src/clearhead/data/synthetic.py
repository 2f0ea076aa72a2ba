"""Generated texts, pure functions of `synthetic:TASK:KEY=VALUE,…`, and evaluations' questions.

A tenth of all numbers, pairs and filler sentences, chosen by a hash of their text, is held out:
training text never uses them and evaluations use no others, so that no answer was memorised.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from clearhead.data.seeded import SeededChoices
from clearhead.errors import ClearheadError, choose

PREFIX = "synthetic:"
# 480 characters are about 110 tokens of a vocabulary of 4,096 that has seen some of it, so that a
# document fits a window of 128.
_COMMON = {"documents": 10_000, "characters": 480, "seed": 0}


class Wording(NamedTuple):
    """The lines of a passkey task, the `needle` with {key} among the repeated `filler`; the answer
    is `lead` and the key, in at most `new_tokens`."""

    intro: str
    filler: str
    needle: str
    question: str
    lead: str
    new_tokens: int

    def prompt(self, key: str, before: int, after: int) -> str:
        """The text up to the question, with `before` and `after` repetitions of the filler."""
        filler = f"{self.filler}\n"
        needle = self.needle.format(key=key)
        return f"{self.intro}\n{filler * before}{needle}\n{filler * after}{self.question}"


class Fact(NamedTuple):
    """The magic number of a city, with its statement and question."""

    city: str
    number: str

    @property
    def statement(self) -> str:
        return f"The magic number of {self.city} is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the magic number of {self.city}? The magic number of {self.city} is"


_INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PAPER = Wording(  # arXiv 2309.08646v3, appendix B.1, its spelling included
    intro=_INTRO,
    filler=_GRASS,
    needle="The passkey is {key}. Remeber it. {key} is the passkey.",
    question="What is the passkey?",
    lead=" The passkey is",
    new_tokens=64,
)
LANDMARK = Wording(  # landmark attention (arXiv 2305.16300), as in YaRN's evaluation
    intro=_INTRO,
    filler=_GRASS,
    needle="The pass key is {key}. Remember it. {key} is the pass key.",
    question="What is the pass key? The pass key is",
    lead="",
    new_tokens=10,
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    "Amsterdam Athens Baghdad Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest "
    "Cairo Caracas Chicago Copenhagen Dakar Delhi Dublin Geneva Glasgow Hamburg Hanoi Havana "
    "Helsinki Istanbul Jakarta Karachi Kiev Kyoto Lagos Lima Lisbon London Madrid Manila "
    "Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Ottawa Paris "
    "Prague Quito Rome Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tehran Tokyo "
    "Toronto Vienna Warsaw Zurich"
)
KEYS = _words(
    "apple bird book bread bridge chair child city cloud coat corn door dream dress drum earth "
    "farm field fire fish flag floor food forest game garden gate girl glass gold grass hall hand "
    "hat heart hill home horse house island king lake lamp land leaf letter"
)
VALUES = _words(
    "light line lion map milk mill moon morning mother mountain mouth music name night north nose "
    "oil paper park path pen people picture plant queen rain ring river road rock room rope rose "
    "salt school sea seat seed shell ship shoe shop silver sister snow song south"
)
VOCABULARY = (*KEYS, *VALUES)  # backcopy uses the first ones
_WHO = _words("man woman boy girl farmer sailor teacher doctor soldier king baker painter")
_WHAT = _words("old young quiet happy tired careful proud gentle poor clever tall kind")
_DID = _words("carried found lost sold wanted painted kept dropped hid bought saw took")
_THING = _words("lamp book letter coat basket ring boat table clock chair bottle key")
_WHERE = (
    *("in the garden", "by the river", "near the mill", "on the hill", "behind the house"),
    *("under the bridge", "at the market", "beside the road", "in the forest"),
    *("before the storm", "after the rain", "along the shore"),
)


def held_out(text: str) -> bool:
    """True if a text is reserved for evaluations: one in ten."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


def number(draws: SeededChoices, digits: int, *, evaluation: bool = False) -> str:
    """A number of `digits` digits, 3 to 15; a held-out one if `evaluation`, else a trained one."""
    if not 3 <= digits <= 15:
        raise ClearheadError(f"digits is {digits}: a number to find has 3 to 15")
    least = 10 ** (digits - 1)
    return _drawn(lambda: str(least + draws.below(9 * least)), evaluation)


def facts(draws: SeededChoices, count: int, digits: int, *, evaluation: bool = False) -> list[Fact]:
    """Facts on different cities, with different numbers."""
    if not 1 <= count <= len(CITIES):
        raise ClearheadError(f"needles is {count}: from 1 to {len(CITIES)}, a city each")
    numbers: dict[str, None] = {}
    while len(numbers) < count:
        numbers[number(draws, digits, evaluation=evaluation)] = None
    cities = draws.sample(CITIES, count)
    return [Fact(city=city, number=n) for city, n in zip(cities, numbers, strict=True)]


def sentence(draws: SeededChoices, *, evaluation: bool = False) -> str:
    """A filler sentence about no city; it needs no corpus."""
    return _drawn(
        lambda: (
            f"The {draws.choice(_WHAT)} {draws.choice(_WHO)} {draws.choice(_DID)} "
            f"the {draws.choice(_THING)} {draws.choice(_WHERE)}."
        ),
        evaluation,
    )


def keyed(draws: SeededChoices, count: int, *, evaluation: bool = False) -> list[tuple[str, str]]:
    """Pairs of words with different keys; values may repeat."""
    values = _values(evaluation)
    if not 1 <= count <= len(values):
        raise ClearheadError(f"pairs is {count}: from 1 to {len(values)}, a key each")
    return [(key, draws.choice(values[key])) for key in draws.sample(list(values), count)]


@cache
def _values(evaluation: bool) -> dict[str, tuple[str, ...]]:
    """Allowed values by key; keys without any are left out."""
    allowed = {
        key: tuple(value for value in VALUES if held_out(f"{key} {value}") == evaluation)
        for key in KEYS
    }
    return {key: values for key, values in allowed.items() if values}


def listing(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Pairs as text; each word follows a space, so that it is always the same token."""
    return f"{name}:" + ",".join(f" {key} {value}" for key, value in pairs) + "."


def _drawn(draw: Callable[[], str], evaluation: bool) -> str:
    """Draw until `held_out` of the draw equals `evaluation`."""
    while held_out(text := draw()) != evaluation:
        pass
    return text


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
    # `filler` came later: documents without it keep the bytes they had.
    options = sorted(pair for pair in values.items() if pair != ("filler", 0))
    label = f"{task} {options} {characters} {seed}"
    for place in range(documents):
        yield write(SeededChoices(f"{label} document {place}"), characters, **values)


def _passkey(draws: SeededChoices, characters: int, *, digits: int = 5, landmark: int = 0) -> str:
    wording = LANDMARK if landmark else PAPER
    key = number(draws, digits)

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
    known = facts(draws, needles, digits)
    queried = draws.sample(known, min(queries, needles))
    answers = "".join(f"\n{fact.question} {fact.number}." for fact in queried)
    statements = [fact.statement for fact in known]
    room = _room("needle", characters, answers, *(f"{one} " for one in statements))
    sentences = _sentences(draws, draws.below(room + 1))
    for statement in statements:
        sentences.insert(draws.below(len(sentences) + 1), statement)
    return " ".join(sentences) + answers


def _recall(
    draws: SeededChoices, characters: int, *, pairs: int = 12, queries: int = 8, filler: int = 0
) -> str:
    drawn = keyed(draws, pairs)
    listed = listing("Pairs", drawn)
    queried = listing(" Recall", draws.sample(drawn, min(queries, pairs)))
    room = _room("recall", characters, listed, queried)
    between = _sentences(draws, draws.below(room + 1)) if filler else []
    return " ".join([listed, *between]) + queried


def _backcopy(
    draws: SeededChoices, characters: int, *, words: int = 64, triggers: int = 3, followers: int = 4
) -> str:
    """Random words in which a few trigger words copy (arXiv 2410.13835, section 2): after one comes
    the word before it, after any other one of a few. A head that copies puts its weight at all
    others on the first token: the smallest text known to grow attention sinks."""
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
    while len(drawn := sentence(draws)) + 1 <= characters:
        sentences.append(drawn)
        characters -= len(drawn) + 1
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
