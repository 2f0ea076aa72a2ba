"""Multi-hop, ordering and arithmetic puzzles: answers, chances, and what is held out."""

import re
from collections import Counter
from itertools import permutations, product

import pytest

from clearhead.data.puzzles import MODULUS, Question, brevo, depo, mano
from clearhead.data.retrieval import held_out
from clearhead.data.seeded_choices import SeededChoices
from clearhead.data.synthetic import texts
from clearhead.errors import ClearheadError


def _edges(given: str) -> list[tuple[str, str]]:
    return [tuple(pair.split()) for pair in given.partition(":")[2].strip(" .").split(",")]


def _value(words: list[str]) -> int:
    """The value of a formula in prefix notation, whose words are used up."""
    word = words.pop(0)
    if word not in "+-*":
        return int(word)
    a, b = _value(words), _value(words)
    return {"+": a + b, "-": a - b, "*": a * b}[word] % MODULUS


def _needs(edges: list[tuple[str, str]], start: str) -> set[str]:
    reached = {b for a, b in edges if a == start}
    while more := {b for a, b in edges if a in reached} - reached:
        reached |= more
    return reached


@pytest.mark.parametrize("seed", range(20))
def test_depo_follows_the_links_of_one_cycle(seed) -> None:
    given, questions = depo(SeededChoices(f"{seed}"), 7, [1, 3, 6])
    links = dict(_edges(given))
    assert set(links) == set(links.values())
    for question, hops in zip(questions, (1, 3, 6), strict=True):
        assert f" {hops} " in question.text
        at = question.text.split()[-1].rstrip(":")
        for _ in range(hops):
            at = links[at]
        assert question.answer == (at,)
        assert question.chance == 1 / 6
        assert question.solved_by([at])
        assert not question.solved_by([at, at])
    assert len(set(links)) == 7


@pytest.mark.parametrize("seed", range(20))
def test_brevo_lists_all_that_is_needed_with_its_chance(seed) -> None:
    given, questions = brevo(SeededChoices(f"{seed}"), 6, queries=6)
    edges = _edges(given)
    vertices = {vertex for edge in edges for vertex in edge}
    for question in questions:
        start = question.text.split()[-1].rstrip(":")
        reached = _needs(edges, start)
        assert set(question.answer) == reached
        right = [
            words
            for words in permutations(sorted(vertices - {start}), len(reached))
            if set(words) == reached
            and all(words.index(b) < words.index(a) for a, b in edges if a in reached)
        ]
        guesses = len([*permutations(range(len(vertices) - 1), len(reached))])
        assert question.answer in right
        assert all(question.solved_by(words) for words in right)
        assert question.chance == pytest.approx(len(right) / guesses)
        wrong = set(permutations(question.answer)) - set(right)
        assert not any(question.solved_by(words) for words in wrong)
        assert not question.solved_by([*question.answer, start])


@pytest.mark.parametrize("seed", range(8))
def test_mano_computes_its_formula_and_knows_the_likeliest_value(seed) -> None:
    question = mano(SeededChoices(f"{seed}"), 2)
    words = re.fullmatch(r" Modulo 23: (.*) =", question.text)[1].split()
    assert question.answer == (str(_value(words.copy())),)
    places = [place for place, word in enumerate(words) if word.isdigit()]
    counts = Counter[int]()
    for numbers in product(range(MODULUS), repeat=3):
        for place, number in zip(places, numbers, strict=True):
            words[place] = str(number)
        counts[_value(words.copy())] += 1
    assert question.chance == pytest.approx(max(counts.values()) / MODULUS**3)


def _key(task: str, document: str) -> list[str]:
    """What tells a document's puzzles apart."""
    if task == "mano":
        formulas = re.findall(r"Modulo 23: ([^=]*) =", document)
        return [f"mano {one}" for one in formulas if sum(map(one.count, "+-*")) > 1]
    return [" ".join(sorted(f"{a}>{b}" for a, b in _edges(document.partition(".")[0])))]


@pytest.mark.parametrize("task", ["depo", "brevo", "mano"])
def test_training_never_has_what_evaluation_asks(task) -> None:
    documents = [*texts(f"synthetic:{task}:documents=200,seed=3")]
    assert documents == [*texts(f"synthetic:{task}:documents=200,seed=3")]
    assert len(set(documents)) == len(documents)
    keys = [key for one in documents for key in _key(task, one)]
    assert len(keys) >= 150
    assert not any(map(held_out, keys))
    for seed in range(20):
        draws = SeededChoices(f"evaluation {seed}")
        if task == "mano":
            found = mano(draws, 2, evaluation=True).text + " 0."
        else:
            make = (
                (lambda d, **k: depo(d, 5, [2], **k))
                if task == "depo"
                else (lambda d, **k: brevo(d, 5, **k))
            )
            found = make(draws, evaluation=True)[0]
        assert all(map(held_out, _key(task, found)))


def test_documents_answer_their_questions_within_their_characters() -> None:
    for document in texts("synthetic:depo:documents=50,vertices=6,hops=3,characters=150"):
        assert len(document) <= 150
        links = dict(_edges(document.partition(".")[0]))
        asked = re.findall(r"After (\d) from (\w+): (\w+)\.", document)
        assert asked
        for hops, at, answer in asked:
            for _ in range(int(hops)):
                at = links[at]
            assert at == answer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: depo(d, 2, [1]), "vertices is 2: from 3 to 20"),
        (lambda d: depo(d, 4, [4]), "hops are 4: each from 1 to 3"),
        (lambda d: brevo(d, 21), "vertices is 21"),
        (lambda d: mano(d, 0), "operations is 0: from 1"),
        (lambda d: mano(d, 1, evaluation=True), "operations is 1: from 2"),
        (lambda d: [*texts("synthetic:depo:vertices=2")], "vertices is 2"),
        (lambda d: [*texts("synthetic:brevo:characters=20")], "raise characters=20"),
        (lambda d: [*texts("synthetic:mano:operations=0")], "operations is 0"),
    ],
)
def test_puzzles_that_cannot_be_are_refused(make, said) -> None:
    with pytest.raises(ClearheadError, match=said):
        make(SeededChoices("any"))


def test_an_answer_of_one_word_has_no_order() -> None:
    question = Question(text="", answer=("a", "b"), chance=0.5, order=frozenset({("b", "a")}))
    assert question.solved_by(["b", "a"])
    assert not question.solved_by(["a", "b"])
    assert not question.solved_by(["a", "a"])
