"""Puzzles that take several steps in the head: Depo, Brevo and Mano, after arXiv 2512.17351.

`depo` follows a cycle some hops on, `brevo` lists all that a thing needs, directly or not, in an
order in which it can be had, and `mano` computes a formula modulo 23. Each is a pure function of
its `SeededChoices`. A tenth of all cycles, graphs and formulas, by a hash, is held out: training
text never has one, evaluations have no others. Formulas of one operation are the knowledge that
Mano is about: training has all of them, and evaluations ask for longer ones only.

Where they differ from the paper's: vertices are English words (its names are tokens of their own,
one or several), so that any tokenizer reads them; a vertex of Brevo needs at most 2 others (up to
4); its puzzles are drawn anew and seldom meet twice, ours are told apart by the hash. Sizes are
smaller: 3 to 8 vertices and up to 4 hops or operations, unless other numbers are given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from clearhead.data.retrieval import KEYS, VALUES, drawn, listing
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError

WORDS = KEYS + VALUES
MODULUS = 23
LEAST = 3  # vertices
MOST = 20  # vertices and operations: chances are counted over all subsets of a graph
Edge = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question on a puzzle and its answer.

    Attributes:
        text: up to the answer, whose words follow with a space before each.
        chance: of a guess that knows what kind of answer it is, and how many words.
        order: pairs of answer words of which the first must come first; others may stand anyhow.
    """

    text: str
    answer: tuple[str, ...]
    chance: float
    order: frozenset[Edge] = frozenset()

    def solved_by(self, words: Sequence[str]) -> bool:
        """True if these are the answer's words, each once, in an order that is allowed."""
        place = {word: number for number, word in enumerate(words)}
        same = sorted(words) == sorted(self.answer)
        return same and all(place[first] < place[second] for first, second in self.order)


def depo(
    draws: SeededChoices, vertices: int, hops: Sequence[int], *, evaluation: bool = False
) -> tuple[str, list[Question]]:
    """The links of a cycle in a drawn order; a question for each number of hops, from anywhere.

    Chance is one of the other vertices: fewer hops than vertices never lead back.

    Raises:
        ClearheadError: hops that lead back or nowhere, or too few or many vertices.
    """
    check("vertices", vertices, LEAST)
    if not all(1 <= some < vertices for some in hops):
        raise ClearheadError(
            f"hops are {' '.join(map(str, hops))}: each from 1 to {vertices - 1}, less than the "
            f"{vertices} vertices"
        )
    cycle = drawn(lambda: draws.sample(WORDS, vertices), evaluation, lambda one: _key(_ring(one)))
    questions = []
    for some in hops:
        start = draws.below(vertices)
        questions.append(
            Question(
                text=f" After {some} from {cycle[start]}:",
                answer=(cycle[(start + some) % vertices],),
                chance=1 / (vertices - 1),
            )
        )
    return _listed("Links", _ring(cycle), draws), questions


def brevo(
    draws: SeededChoices, vertices: int, queries: int = 1, *, evaluation: bool = False
) -> tuple[str, list[Question]]:
    """The edges of an acyclic graph in a drawn order; questions for all that a vertex needs.

    Chance is as many different vertices as the answer has, drawn in any order from all others.

    Raises:
        ClearheadError: too few or many vertices.
    """
    check("vertices", vertices, LEAST)
    edges = drawn(lambda: _graph(draws, vertices), evaluation, _key)
    needed: dict[str, list[str]] = {}
    for vertex, other in edges:
        needed.setdefault(vertex, []).append(other)
    listed = len({vertex for edge in edges for vertex in edge})
    questions = []
    for start in draws.sample([*needed], min(queries, len(needed))):
        reached, left = list[str](), [*needed[start]]
        while left:
            if (vertex := left.pop()) not in reached:
                reached.append(vertex)
                left += needed.get(vertex, [])
        order = frozenset((b, a) for a, b in edges if a in reached)
        questions.append(
            Question(
                text=f" First for {start}:",
                answer=_sorted(draws, reached, order),
                chance=_orders(reached, order) / math.perm(listed - 1, len(reached)),
                order=order,
            )
        )
    return _listed("Needs", edges, draws), questions


def mano(draws: SeededChoices, operations: int, *, evaluation: bool = False) -> Question:
    """A formula in prefix notation, modulo 23, of so many of +, − and ×.

    Chance is the most frequent value, 0 or any other, of its shape and operators under drawn
    numbers.

    Raises:
        ClearheadError: too few or many operations.
    """
    check("operations", operations, 2 if evaluation else 1)

    def key(found: tuple[str, int, float]) -> str:
        return f"mano {found[0]}"

    draw = lambda: _formula(draws, operations)  # noqa: E731
    text, value, zero = drawn(draw, evaluation, key) if operations > 1 else draw()
    return Question(
        text=f" Modulo {MODULUS}: {text} =",
        answer=(str(value),),
        chance=max(zero, (1 - zero) / (MODULUS - 1)),
    )


def check(name: str, number: int, least: int) -> None:
    """Refuse a number of vertices or operations that no puzzle has."""
    if not least <= number <= MOST:
        raise ClearheadError(f"{name} is {number}: from {least} to {MOST}")


def _ring(cycle: Sequence[str]) -> list[Edge]:
    return list(pairwise((*cycle, cycle[0])))


def _key(edges: Sequence[Edge]) -> str:
    """The edges in one order, so that a puzzle listed otherwise is the same."""
    return " ".join(sorted(f"{a}>{b}" for a, b in edges))


def _listed(name: str, edges: Sequence[Edge], draws: SeededChoices) -> str:
    """The edges in a drawn order."""
    return listing(name, draws.sample(edges, len(edges)))


def _graph(draws: SeededChoices, vertices: int) -> list[Edge]:
    """Edges (vertex, one that it needs); the last vertex needs at least one."""
    names = draws.sample(WORDS, vertices)
    edges = list[Edge]()
    for place, vertex in enumerate(names):
        count = draws.below(3) if place < vertices - 1 else 1 + draws.below(2)
        edges += [(vertex, other) for other in draws.sample(names[:place], min(count, place))]
    return edges


def _sorted(
    draws: SeededChoices, vertices: Sequence[str], order: frozenset[Edge]
) -> tuple[str, ...]:
    """The vertices in a drawn order of those allowed."""
    found, left = list[str](), sorted(vertices)
    while left:
        free = [one for one in left if not any(b == one and a in left for a, b in order)]
        found.append(draws.choice(free))
        left.remove(found[-1])
    return tuple(found)


def _orders(vertices: Sequence[str], order: frozenset[Edge]) -> int:
    """The number of orders that are allowed, over the sets of those that have come."""
    before = [sum(1 << vertices.index(a) for a, b in order if b == vertex) for vertex in vertices]
    ways = {0: 1}
    for _ in vertices:
        following: dict[int, int] = {}
        for come, number in ways.items():
            for place, needed in enumerate(before):
                if not come >> place & 1 and needed & come == needed:
                    further = come | 1 << place
                    following[further] = following.get(further, 0) + number
        ways = following
    (number,) = ways.values()
    return number


def _formula(draws: SeededChoices, operations: int) -> tuple[str, int, float]:
    """A formula, its value, and the probability of 0 for drawn numbers in its shape."""
    if not operations:
        number = draws.below(MODULUS)
        return str(number), number, 1 / MODULUS
    operator, left = draws.choice("+-*"), draws.below(operations)
    (a, x, p), (b, y, q) = (_formula(draws, some) for some in (left, operations - 1 - left))
    value = {"+": x + y, "-": x - y, "*": x * y}[operator] % MODULUS
    both = p * q
    # The values other than 0 are equally likely, of either side.
    zero = p + q - both if operator == "*" else both + (1 - p) * (1 - q) / (MODULUS - 1)
    return f"{operator} {a} {b}", value, zero
