"""Contextual hallucination: statements of a generated text that its document does not support.

After the Differential Transformer (arXiv 2410.05258, section 3.6) and Lookback Lens (2407.07071):
answers to questions on documents, and summaries, by greedy decoding. Beside a judge's verdicts
stand counts, which find words and not meaning: a paraphrase lowers the support of bigrams, and a
false sentence made of the document's own words passes.
"""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from clearhead.data import labelled
from clearhead.data.corpus import fingerprint_of
from clearhead.data.seeded_choices import SeededChoices
from clearhead.data.tasks import Task
from clearhead.errors import ClearheadError
from clearhead.eval.judge import PROMPT, Judge
from clearhead.eval.options import HallucinationOptions
from clearhead.eval.task import EvalTask, check_count, check_files, labelled_rows
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.runs import Line

_ANSWER = "Answer the question from the document alone, in a few words."
_SUMMARY = "Summarize the document in a few sentences, with nothing that it does not say."
_NAME = re.compile(r"(?<=[\w,;)] )[^\W\d_]\w*")


class HallucinationTask(EvalTask, HallucinationOptions):
    headlines = (
        *("accuracy", "undecided", "unjudged"),
        *("answer_contained", "bigram_support", "unsupported_names"),
    )

    def cells(self, subject: Subject) -> list[Cell]:
        check_files("hallucination", self.files, "summaries.jsonl.gz")
        check_count(samples=self.samples, tokens=self._new_tokens)
        self.judge.check()
        for length in subject.lengths:
            subject.check_length(length)
            for file in self.files:
                self._asked(subject, file, length)
        by = {"judge": self.judge.model} if self.judge.model else {}
        return [
            {"file": Path(file).name, "digest": digest, **by, "length": length}
            for file in self.files
            for digest in [fingerprint_of(*self._rows(file))[:12]]
            for length in subject.lengths
        ]

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        (file,) = [file for file in self.files if Path(file).name == cell["file"]]
        rows, documents, prompts = self._asked(subject, file, cell["length"])
        answers = subject.reader.ask(
            prompts, [()] * len(prompts), new_tokens=self._new_tokens, advanced=advanced
        )
        # Models that only continue texts go on to the next question or document by themselves.
        stop = "\n" if self.pair_field else "\n\n"
        written = [subject.decode(answer.written).strip() for answer in answers]
        texts = [text.partition(stop)[0].rstrip() for text in written]
        references = [row.label if isinstance(row.label, list) else [row.label] for row in rows]
        judged: Line = {}
        if self.pair_field:
            judged["answer_contained"] = fmean(map(contains, texts, references))
        if self.judge.model:
            each = zip(documents, rows, references, texts, strict=True)
            judged |= Judge(self.judge).verdicts(
                [PROMPT.format(a, b.pair or _SUMMARY, "; ".join(c), d) for a, b, c, d in each]
            )
        return {
            **judged,
            **grounding(texts, documents),
            "items": len(rows),
            "cut": fmean(a.text != b for a, b in zip(rows, documents, strict=True)),
            "texts": texts,
        }

    @property
    def _new_tokens(self) -> int:
        return self.answer_tokens if self.pair_field else self.summary_tokens

    def _rows(self, file: str) -> list[labelled.Row]:
        pair, label = self.pair_field or None, self.label_field
        fields = Task(name=file, text=self.text_field, pair=pair, label=label)
        rows = labelled_rows(file, fields, "--hallucination.")
        for row in rows:
            right = row.label if isinstance(row.label, list) else [row.label]
            if not row.text.strip() or not right or not all(isinstance(x, str) for x in right):
                raise ClearheadError(f"{row.where}: give a document and a reference, not empty")
        return rows

    def _asked(
        self, subject: Subject, file: str, length: int
    ) -> tuple[list[labelled.Row], list[str], list[Prompt]]:
        """Rows, the part of each document that fits, and prompts."""
        rows, documents, prompts = list(self._rows(file)), [], []
        if len(rows) > self.samples:
            rows = SeededChoices(f"hallucination {subject.seed}").sample(rows, self.samples)
        rows.sort(key=lambda row: (len(row.text), row.text))  # like ones run together
        for row in rows:
            opening = f"{_SUMMARY if row.pair is None else _ANSWER}\n\nDocument:\n"
            last = "\n\nSummary:" if row.pair is None else f"\n\nQuestion: {row.pair}\nAnswer:"
            start, middle, end = subject.ids(opening, row.text, last)
            room = length - self._new_tokens - len(start) - len(end)
            if room < 1:
                raise ClearheadError(
                    f"length {length} has no room for a document: a prompt takes {len(start + end)}"
                    f" tokens without it, its answer {self._new_tokens}; give longer lengths"
                )
            documents.append(row.text if len(middle) <= room else subject.decode(middle[:room]))
            prompts.append(Prompt((*start, *middle[:room]), end))
        return rows, documents, prompts


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
