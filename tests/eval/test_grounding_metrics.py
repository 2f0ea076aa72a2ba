"""Counts of words against hand-computed values, and SQuAD's against its script written anew."""

import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.eval.document_prompts import Case, DocumentPrompt
from clearhead.eval.grounding_metrics import (
    contains,
    exact_match,
    grounding_metrics,
    names,
    numbers,
    token_f1,
    unsupported_names,
    unsupported_ngrams,
    unsupported_numbers,
)
from clearhead.eval.prefill import Prompt

TEXTS = st.lists(
    st.sampled_from(
        ("the", "a", "An", "ship", "Ship.", "U.S.", "sea", "'", "left", "theatre", "é")
    ),
    max_size=8,
).map(" ".join)


def _squad(text):
    text = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _squad_f1(text, answer):
    mine, right = _squad(text), _squad(answer)
    if not mine or not right:
        return int(mine == right)
    same = sum((Counter(mine) & Counter(right)).values())
    if not same:
        return 0
    precision, recall = same / len(mine), same / len(right)
    return 2 * precision * recall / (precision + recall)


@settings(deadline=None)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_f1_and_exact_match_are_those_of_squad(text, answers):
    assert token_f1(text, answers) == pytest.approx(max(_squad_f1(text, a) for a in answers))
    assert exact_match(text, answers) == any(_squad(text) == _squad(a) for a in answers)
    words, found = _squad(text), False
    for answer in map(_squad, answers):
        starts = range(len(words) - len(answer) + 1)
        found |= bool(answer) and any(words[i : i + len(answer)] == answer for i in starts)
    assert contains(text, answers) == found


def test_f1_by_hand():
    assert token_f1("The old captain left", ["captain"]) == 2 * 1 / (3 + 1)
    assert token_f1("the sea, the sea", ["sea"]) == 2 * 1 / (2 + 1)
    assert token_f1("no", ["yes", "No!"]) == 1
    assert token_f1("", ["yes"]) == 0
    assert not contains("Northern", ["no"])  # words, not letters
    assert contains("It was Wilhelm C. Röntgen.", ["Wilhelm C Röntgen"])
    assert not exact_match("the Outback of Australia", ["Outback"])


def test_numbers_by_hand():
    assert numbers("In 1901 he got 150,782 SEK ($1,500.5), the 21st; 3.0 and 1,50.") == {
        *("1901", "150782", "1500.5", "21", "3.0", "1,50")
    }
    share = unsupported_numbers("1901, 1,000 and 7, again 7", "In 1901: 1000 of 17")
    assert (share.found, share.missing) == (3, 1)  # 7 is not 17
    assert share.unsupported == pytest.approx(1 / 3)
    assert unsupported_numbers("none", "1").unsupported is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The ship met Marie Curie.", {"marie", "curie"}),
        ("Paris is big. Rome too. “Bonn” fell: Nice rose\nOslo won", set()),  # sentences' starts
        ("NASA met McDonald. USA.", {"nasa", "mcdonald", "usa"}),
        ("so I said I'm sure, I’ll go", set()),
        ("the captain's, Ann's and O’Brien’s boat", {"ann", "o'brien"}),
        ("of Anglo-Saxon (Latin) “Greek” origin", {"anglo", "saxon", "latin", "greek"}),
        ("he met Álvaro and Ωmega", {"álvaro", "ωmega"}),
        ("", set()),
    ],
)
def test_names_by_hand(text, found):
    assert names(text) == found


def test_names_are_looked_up_in_any_case():
    share = unsupported_names("He met Ann, Bob's men and Ann in ROME.", "ann came to rome, o bob")
    assert (share.found, share.missing) == (3, 0)
    share = unsupported_names("He met Ann and Bo.", "Ann, Bob")
    assert (share.found, share.missing) == (2, 1)  # Bo is no word there


def test_ngrams_by_hand():
    text, document = "The ship left, the ship sank.", "The SHIP left the harbour; it sank"
    found = {n: unsupported_ngrams(text, document, n) for n in (1, 2, 3)}
    assert (found[1].found, found[1].missing) == (4, 0)
    # the ship, ship left, left the, ship sank
    assert (found[2].found, found[2].missing) == (4, 1)
    assert found[2].supported == 3 / 4
    # the ship left, ship left the, left the ship, the ship sank
    assert (found[3].found, found[3].missing) == (4, 2)
    assert unsupported_ngrams("one", document, 2).supported is None


@settings(deadline=None)
@given(TEXTS)
def test_a_text_supports_itself(text):
    assert not unsupported_names(text, text).missing
    assert not any(unsupported_ngrams(text, text, n).missing for n in (1, 2, 3))


def _prompt(case: Case, document: str) -> DocumentPrompt:
    return DocumentPrompt(case=case, prompt=Prompt((), (1,)), document=document, cut=False)


def test_all_measures_together():
    answer = Case(kind="answer", document="x", question="Who is Ann, 5?", references=("the sea",))
    summary = Case(kind="summary", document="x", question="", references=("r",))
    found = grounding_metrics(
        ["Ann saw 5 or 6 at sea", "no 7 for Eve", "it saw 8"],
        [
            _prompt(answer, "On the sea 6 men"),
            _prompt(answer, "nothing"),
            _prompt(summary, "it saw 8 of them"),
        ],
    )
    assert found.pop("unigram_support") == pytest.approx((2 + 0 + 3) / (7 + 4 + 3))
    assert found.pop("bigram_support") == pytest.approx(2 / (6 + 3 + 2))
    assert found.pop("trigram_support") == pytest.approx(1 / (5 + 2 + 1))
    assert found == {
        "unsupported_numbers": 1 / 4,  # 7; the question has 5
        "numbers": 4,
        "unsupported_names": 1.0,  # Ann starts a sentence
        "names": 1,
        "unsupported_names_by_chance": None,  # all have one document
        "names_above_chance": None,
        "words": pytest.approx(14 / 3),
        "answer_contained": 1 / 2,
        "exact_match": 0,
        "token_f1": pytest.approx(2 / (7 + 1) / 2),
        "answer_in_document": 1 / 2,
    }
    assert "token_f1" not in grounding_metrics(["it saw 8"], [_prompt(summary, "it")])


def test_the_chance_level_of_names_is_another_document():
    """Two on one document have the next other one; the last has the first."""
    documents = ["Ann met Bob", "Ann met Bob", "Eve left"]
    cases = [Case(kind="summary", document=d, question="", references=("r",)) for d in documents]
    prompts = [_prompt(case, case.document) for case in cases]
    found = grounding_metrics(["it saw Ann", "it saw Bob and Eve", "it saw Eve"], prompts)
    assert found["names"] == 4
    assert found["unsupported_names"] == 1 / 4  # Eve is in another
    assert found["unsupported_names_by_chance"] == 3 / 4
    assert found["names_above_chance"] == 1 / 2
    silent = grounding_metrics(["it"] * 3, prompts)
    assert silent["unsupported_names"] is silent["names_above_chance"] is None
