"""Retrieval texts: passkeys, magic numbers of cities and pairs of words, with their questions.

Both the synthetic training text and the evaluations are built from these. A tenth of all numbers,
pairs and filler sentences, chosen by a hash of their text, is held out: training text never uses
them and evaluations use no others, so that no answer can have been memorised.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from clearhead.data.seeded import SeededChoices
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The wording of a passkey task: hiding place, key and question.

    Attributes:
        intro, filler, question: lines of the prompt in this order, the filler repeated.
        needle: the line with {key}, placed among the filler.
        lead: text between the question and the key in an answer.
        new_tokens: number of tokens that a model may generate, as in the source.
    """

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
_WHO = _words("man woman boy girl farmer sailor teacher doctor soldier king baker painter")
_WHAT = _words("old young quiet happy tired careful proud gentle poor clever tall kind")
_DID = _words("carried found lost sold wanted painted kept dropped hid bought saw took")
_THING = _words("lamp book letter coat basket ring boat table clock chair bottle key")
_WHERE = (
    *("in the garden", "by the river", "near the mill", "on the hill", "behind the house"),
    *("under the bridge", "at the market", "beside the road", "in the forest"),
    *("before the storm", "after the rain", "along the shore"),
)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """The magic number of a city, with its statement and question."""

    city: str
    number: str

    @property
    def statement(self) -> str:
        return f"The magic number of {self.city} is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the magic number of {self.city}? The magic number of {self.city} is"


def held_out(text: str) -> bool:
    """True if a text is reserved for evaluations: one in ten."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


def number(draws: SeededChoices, digits: int, *, evaluation: bool = False) -> str:
    """A number of `digits` digits, 3 to 15; a held-out one if `evaluation`, else a trained one."""
    if not 3 <= digits <= 15:
        raise ClearheadError(f"digits is {digits}: a number to find has 3 to 15")
    least = 10 ** (digits - 1)
    return drawn(lambda: str(least + draws.below(9 * least)), evaluation)


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
    return drawn(
        lambda: (
            f"The {draws.choice(_WHAT)} {draws.choice(_WHO)} {draws.choice(_DID)} "
            f"the {draws.choice(_THING)} {draws.choice(_WHERE)}."
        ),
        evaluation,
    )


def pairs(draws: SeededChoices, count: int, *, evaluation: bool = False) -> list[tuple[str, str]]:
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


def listing(name: str, found: Sequence[tuple[str, str]]) -> str:
    """Pairs as text; each word follows a space, so that it is always the same token."""
    return f"{name}:" + ",".join(f" {key} {value}" for key, value in found) + "."


def drawn(draw: Callable[[], str], evaluation: bool) -> str:
    """Draw until `held_out` of the draw equals `evaluation`."""
    while held_out(text := draw()) != evaluation:
        pass
    return text
