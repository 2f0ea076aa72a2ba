"""Words of generated texts that stand in their documents, counted without a judge.

The counts find words, not meaning: a paraphrase lowers the support of bigrams, and a false sentence
made of the document's own words passes.
"""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

_NAME = re.compile(r"(?<=[\w,;)] )[^\W\d_]\w*")


def grounding(texts: Sequence[str], documents: Sequence[str]) -> dict[str, float | None]:
    """Counts over all texts together; a share of nothing is None.

    `bigram_support` is the share of the texts' bigrams that their documents have;
    `unsupported_names` that of their names that their documents lack, and `names_above_chance` how
    many more another document lacks, the next one.
    """
    named, pairs = list(map(names, texts)), list(map(bigrams, texts))
    known = [set(_words(document)) for document in documents]
    others = [
        next((other for other in (*known[n:], *known[:n]) if other != mine), mine)
        for n, mine in enumerate(known)
    ]
    missing, chance = _missing(named, known), _missing(named, others)
    novel = _missing(pairs, list(map(bigrams, documents)))
    return {
        "unsupported_names": missing,
        "names_above_chance": None if missing is None or chance is None else chance - missing,
        "bigram_support": None if novel is None else 1 - novel,
    }


def contains(text: str, answers: Sequence[str]) -> bool:
    """True if an answer's words stand in the text's side by side, in any case."""
    words, *others = (f" {' '.join(_words(one))} " for one in (text, *answers))
    return any(other in words for other in others if other.strip())


def bigrams(text: str) -> set[tuple[str, str]]:
    """The different pairs of neighbouring words, in lower case (arXiv 1704.04368, section 6)."""
    return set(pairwise(_words(text)))


def names(text: str) -> set[str]:
    """Capitalised words that follow a word or comma of their sentence, in lower case; never I."""
    return {one.casefold() for one in _NAME.findall(text) if one[0].isupper() and one != "I"}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _missing(parts: Sequence[set[Any]], wholes: Sequence[Collection[Any]]) -> float | None:
    """The share of all members of the parts that their wholes lack."""
    count = sum(map(len, parts))
    lost = [len(part.difference(whole)) for part, whole in zip(parts, wholes, strict=True)]
    return sum(lost) / count if count else None
