"""The bigram-backcopy task: random word sequences in which a few trigger words copy.

After a trigger word comes the word before it; after any other, one of a few that may follow it
(arXiv 2410.13835, section 2). A head that copies has nothing to do at all other words and, since
softmax gives it weight to place, places it on the first token: the smallest text known to grow
attention sinks.
"""

from functools import cache

from clearhead.data.retrieval import KEYS, VALUES
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError


def text(
    draws: SeededChoices, characters: int, *, words: int, triggers: int, followers: int
) -> str:
    """A document of at most so many characters.

    Raises:
        ClearheadError: for numbers that leave nothing to draw from.
    """
    table, copying = _table(words, triggers, followers)
    chosen = [draws.choice(words_of(words))]
    length = len(chosen[0])
    while True:
        last = chosen[-1]
        copies = last in copying and len(chosen) > 1
        word = chosen[-2] if copies else draws.choice(table[last])
        length += 1 + len(word)
        if length > characters:
            return " ".join(chosen)
        chosen.append(word)


def words_of(words: int) -> tuple[str, ...]:
    """The vocabulary of these texts."""
    return (*KEYS, *VALUES)[:words]


@cache
def _table(
    words: int, triggers: int, followers: int
) -> tuple[dict[str, list[str]], frozenset[str]]:
    """The words that may follow each, and the trigger words: the same in every document."""
    names = words_of(words)
    if not (2 <= words <= len(KEYS) + len(VALUES) and triggers < words and 0 < followers < words):
        raise ClearheadError(
            f"synthetic:backcopy: words={words}, triggers={triggers}, followers={followers}: give "
            f"2 to {len(KEYS) + len(VALUES)} words, and fewer triggers and followers than words"
        )
    draws = SeededChoices(f"backcopy {words} {triggers} {followers}")
    copying = frozenset(draws.sample(names, triggers))
    # Nothing follows itself: a copy could not be told from chance.
    others = {name: [each for each in names if each != name] for name in names}
    return {name: draws.sample(others[name], followers) for name in names}, copying
