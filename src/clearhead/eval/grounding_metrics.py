"""Grounding of generated texts in their documents, counted in words, without a judge.

These metrics find words, not meaning: a paraphrase lowers the support of n-grams, and a false
sentence made of the document's own words passes.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from clearhead.eval.document_prompts import DocumentPrompt

NGRAMS = {"unigram": 1, "bigram": 2, "trigram": 3}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_LETTERS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_OPENERS = " \t\"“”'‘’([*#_-–—"
_ENDERS = ".!?:;…\n"


@dataclass(frozen=True, kw_only=True)
class Share:
    """Counts of things in a text: `found` in all, `missing` from the document."""

    found: int = 0
    missing: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(found=self.found + other.found, missing=self.missing + other.missing)

    @property
    def unsupported(self) -> float | None:
        """missing / found; None where there was nothing."""
        return self.missing / self.found if self.found else None

    @property
    def supported(self) -> float | None:
        """1 − unsupported; None where there was nothing."""
        return None if self.unsupported is None else 1 - self.unsupported


def grounding_metrics(texts: Sequence[str], prompts: Sequence[DocumentPrompt]) -> dict[str, Any]:
    """All metrics over all texts, each written to its prompt.

    Shares of numbers, names and n-grams are pooled over texts, None where there were none. A
    question's numbers and names count as the document's. The chance level of unsupported names is
    their share against another document, the next one; None where there is one document alone.
    Answers have three more metrics, averaged, and `answer_in_document`: the share whose reference
    stands in what the model saw.
    """
    numbers, names, by_chance = Share(), Share(), Share()
    others = _others(prompts)
    ngrams = dict.fromkeys(NGRAMS, Share())
    for text, prompt, other in zip(texts, prompts, others, strict=True):
        context = f"{prompt.document}\n{prompt.case.question}"
        numbers += unsupported_numbers(text, context)
        names += unsupported_names(text, context)
        if other is not None:
            by_chance += unsupported_names(text, f"{other.document}\n{prompt.case.question}")
        for name, size in NGRAMS.items():
            ngrams[name] += unsupported_ngrams(text, prompt.document, size)
    metrics: dict[str, Any] = {
        "unsupported_numbers": numbers.unsupported,
        "numbers": numbers.found,
        "unsupported_names": names.unsupported,
        "names": names.found,
        "unsupported_names_by_chance": by_chance.unsupported,
        "names_above_chance": _less(by_chance.unsupported, names.unsupported),
        **{f"{name}_support": share.supported for name, share in ngrams.items()},
        "words": fmean(len(text.split()) for text in texts),
    }
    answers = [
        (text, prompt)
        for text, prompt in zip(texts, prompts, strict=True)
        if prompt.case.kind == "answer"
    ]
    if answers:
        for name, score in _OF_ANSWERS.items():
            metrics[name] = fmean(score(text, one.case.references) for text, one in answers)
        metrics["answer_in_document"] = fmean(
            contains(one.document, one.case.references) for _, one in answers
        )
    return metrics


def _others(prompts: Sequence[DocumentPrompt]) -> list[DocumentPrompt | None]:
    """For each prompt the next one on another document, the first after the last."""
    found = []
    for place, prompt in enumerate(prompts):
        after = (*prompts[place + 1 :], *prompts[:place])
        others = (one for one in after if one.case.document != prompt.case.document)
        found.append(next(others, None))
    return found


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def normalised(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces (SQuAD, arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def contains(text: str, answers: Iterable[str]) -> bool:
    """True if an answer's words, normalised, stand in the text's, one after the other."""
    words = f" {normalised(text)} "
    return any(f" {one} " in words for one in map(normalised, answers) if one)


def exact_match(text: str, answers: Iterable[str]) -> bool:
    """True if the text is an answer, both normalised (SQuAD)."""
    return normalised(text) in {normalised(answer) for answer in answers}


def token_f1(text: str, answers: Iterable[str]) -> float:
    """The harmonic mean of precision and recall of normalised words, of the best answer (SQuAD).

    Where either has no word, 1 if both have none, as in SQuAD 2.0.
    """
    return max(_f1(normalised(text).split(), normalised(answer).split()) for answer in answers)


_OF_ANSWERS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "answer_contained": contains,
    "exact_match": exact_match,
    "token_f1": token_f1,
}


def _f1(words: Sequence[str], answer: Sequence[str]) -> float:
    if not words or not answer:
        return float(words == answer)
    same = (Counter(words) & Counter(answer)).total()
    return 2 * same / (len(words) + len(answer))


def numbers(text: str) -> set[str]:
    """Numbers in digits, without thousands' commas: "1,500.5" is 1500.5; "21st" has 21."""
    found = _NUMBER.findall(text)
    return {one.replace(",", "") if _THOUSANDS.fullmatch(one) else one for one in found}


def names(text: str) -> set[str]:
    """Words with a capital, in lower case and without a possessive 's.

    A capital at the start of a sentence says nothing, so such a word counts only where another
    letter of it is a capital too; I and its contractions never count.
    """
    found = set()
    for match in _LETTERS.finditer(text):
        word = match[0]
        before = text[: match.start()].rstrip(_OPENERS)
        starts = not before or before[-1] in _ENDERS
        capital = any(map(str.isupper, word[1:])) or (word[0].isupper() and not starts)
        if capital and _stem(word).partition("'")[0] != "i":
            found.add(_stem(word))
    return found


def unsupported_numbers(text: str, document: str) -> Share:
    """The text's different numbers, and those of them that are not among the document's."""
    return _share(numbers(text), numbers(document))


def unsupported_names(text: str, document: str) -> Share:
    """The text's different names, and those of them that are no word of the document, in any case.

    English is assumed: in German every noun would be a name.
    """
    return _share(names(text), {_stem(word) for word in _LETTERS.findall(document)})


def unsupported_ngrams(text: str, document: str, size: int) -> Share:
    """The text's different runs of `size` words, and those of them that the document lacks.

    Words are runs of letters, digits and underscores, in lower case. The share of missing ones is
    what the literature on summaries calls novel n-grams (arXiv 1704.04368, section 6).
    """
    return _share(_ngrams(text, size), _ngrams(document, size))


def _share(mine: set[Any], known: set[Any]) -> Share:
    return Share(found=len(mine), missing=len(mine - known))


def _ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.casefold())
    return set(zip(*(words[start:] for start in range(size)), strict=False))


def _stem(word: str) -> str:
    return word.casefold().replace("’", "'").removesuffix("'s")
