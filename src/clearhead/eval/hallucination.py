"""Contextual hallucination: statements of a generated text that its document does not support.

After the Differential Transformer (arXiv 2410.05258, section 3.6) and Lookback Lens (2407.07071):
answers to questions on documents, and summaries, by greedy decoding.
"""

from functools import lru_cache
from pathlib import Path
from statistics import fmean

from clearhead.data import DataConfig, hub, labelled
from clearhead.data.corpus import fingerprint_of
from clearhead.data.seeded_choices import SeededChoices
from clearhead.data.tasks import Task
from clearhead.errors import ClearheadError
from clearhead.eval.answers import Prompt
from clearhead.eval.grounding import contains, grounding
from clearhead.eval.judge import PROMPT, Judge
from clearhead.eval.options import HallucinationOptions
from clearhead.eval.task import EvalTask, Subject, check_count, check_files
from clearhead.measure.task import Advanced, Cell
from clearhead.records.runs import Line
from clearhead.terminal import say

_ANSWER = "Answer the question from the document alone, in a few words."
_SUMMARY = "Summarize the document in a few sentences, with nothing that it does not say."


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
        return (_streamed if hub.is_hub(file) else _read)(file, fields)

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


def _read(file: str, fields: Task) -> list[labelled.Row]:
    rows = labelled.read_rows(
        file, fields, cache=DataConfig().cache_folder, progress=say, options="--hallucination."
    )
    for row in rows:
        right = row.label if isinstance(row.label, list) else [row.label]
        if not row.text.strip() or not right or not all(isinstance(one, str) for one in right):
            raise ClearheadError(f"{row.where}: give a document and a reference, not empty")
    return rows


_streamed = lru_cache(maxsize=8)(_read)  # once for all cells
