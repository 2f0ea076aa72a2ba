"""Synthetic retrieval text: the same for ever, answerable, and apart from what evaluations ask."""

import hashlib
import re

import pytest

from clearhead.data import synthetic
from clearhead.data.seeded import SeededChoices
from clearhead.data.synthetic import texts
from clearhead.errors import ClearheadError

SPECS = ("synthetic:passkey", "synthetic:needle", "synthetic:recall")


def test_the_bytes_never_change_and_are_within_their_length():
    """A corpus is known by its text: another text under the same words would be another run."""
    digest = hashlib.sha256()
    for spec in SPECS:
        drawn = list(texts(f"{spec}:documents=50,characters=600"))
        assert drawn[:20] == list(texts(f"{spec}:documents=20,characters=600"))
        assert drawn != list(texts(f"{spec}:documents=50,characters=600,seed=1"))
        assert len(drawn) == 50
        assert len(set(drawn)) > 45
        assert max(map(len, drawn)) <= 600
        for text in texts(f"{spec}:documents=20"):
            digest.update(text.encode())
    assert digest.hexdigest()[:16] == "c2e1ad69a65801d6"


@pytest.mark.parametrize("landmark", [0, 1])
def test_a_passkey_is_stated_and_answered(landmark):
    for text in texts(f"synthetic:passkey:documents=40,landmark={landmark}"):
        context, answer = text.rsplit("\n", 1)
        (key,) = set(re.findall(r"\d+", context))
        assert answer.endswith(f"is {key}.")
        assert len(key) == 5
        assert not synthetic.held_out(key)


def test_needles_are_stated_once_and_answered():
    for text in texts("synthetic:needle:documents=40,needles=3,queries=2"):
        context, *answers = text.split("\n")
        stated = dict(re.findall(r"magic number of (\w+) is (\d+)\.", context))
        assert len(stated) == 3
        assert len(answers) == 2
        for answer in answers:
            city, number = re.search(r"number of (\w+)\? .* is (\d+)\.$", answer).groups()
            assert stated[city] == number


def test_triggers_copy_and_other_words_follow_by_chance():
    """The rule found again from the text alone: 3 of 64 words copy, the others have 4 followers."""
    after = {}
    for text in texts("synthetic:backcopy:documents=300"):
        words = text.split()
        assert set(words) <= set(synthetic.VOCABULARY[:64])
        for before, word, following in zip(words, words[1:], words[2:], strict=False):
            after.setdefault(word, []).append((before, following))
    often = {word: seen for word, seen in after.items() if len(seen) > 60}
    copying = {word for word, seen in often.items() if all(a == b for a, b in seen)}
    assert len(often) > 40
    assert len(copying) == 3
    for word, seen in often.items():
        if word not in copying:
            followers = {following for _, following in seen}
            assert len(followers) == 4
            assert word not in followers


@pytest.mark.parametrize("filler", [0, 1])
def test_recalled_pairs_were_listed_with_filler_between(filler):
    lengths = set()
    options = f"documents=40,pairs=3,queries=2,filler={filler},characters=300"
    for text in texts(f"synthetic:recall:{options}"):
        listed, recalled = re.fullmatch(r"Pairs:(.*?)\..* Recall:(.*)\.", text).groups()
        pairs, asked = (part.split(",") for part in (listed, recalled))
        assert set(asked) <= set(pairs)
        assert (len(pairs), len(asked), len(set(asked))) == (3, 2, 2)
        lengths.add(len(text))
    assert max(lengths) <= 300
    assert min(lengths) < 110
    assert (max(lengths) > 240) == filler


def test_evaluations_ask_for_what_training_never_has():
    for evaluation in (False, True):
        draws = SeededChoices(f"{evaluation}")
        for _ in range(200):
            sentence = synthetic.sentence(draws, evaluation=evaluation)
            number = synthetic.number(draws, 5, evaluation=evaluation)
            pair = synthetic.keyed(draws, 1, evaluation=evaluation)[0]
            for text in (sentence, number, " ".join(pair)):
                assert synthetic.held_out(text) == evaluation


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("synthetic:paskey", "did you mean passkey"),
        ("synthetic:passkey:digit=5", "did you mean digits"),
        ("synthetic:passkey:digits=x", "digits is 'x'; give a whole number, for example digits=5"),
        ("synthetic:passkey:digits=2", "digits is 2"),
        ("synthetic:passkey:characters=100", "characters more than the 100 allowed"),
        ("synthetic:needle:needles=65", "from 1 to 64"),
        ("synthetic:recall:pairs=99", "pairs is 99"),
        *(
            (f"synthetic:backcopy:{options}", "fewer triggers and followers than words")
            for options in ("words=1", "words=500", "triggers=64", "followers=0")
        ),
    ],
)
def test_refuses_what_cannot_be_made(spec, message):
    with pytest.raises(ClearheadError, match=message):
        next(texts(spec))
