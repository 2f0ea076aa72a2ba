"""Contextual hallucination: statements of a summary that its document does not support.

After the Differential Transformer (arXiv 2410.05258, section 3.6) and Lookback Lens (2407.07071,
appendix B; the wording is our own): summaries by greedy decoding, judged by any OpenAI-compatible
server, and a count of unsupported names, which compares words and not meaning.
"""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from clearhead.data.labelled import Row
from clearhead.data.seeded import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.shots import labelled_rows
from clearhead.measure.answers import Prompt
from clearhead.measure.sweep import Cell, Subject
from clearhead.records.cells import lines_of
from clearhead.records.identity import digest_of
from clearhead.records.runs import Line
from clearhead.settings.data import Task
from clearhead.settings.eval import HallucinationOptions, JudgeConfig
from clearhead.terminal import say

_OPENING = (
    "Summarize the document in a few sentences, with nothing that it does not say.\n\nDocument:\n"
)
TRIES, PAUSE = 3, 2.0  # requests for a verdict; seconds before the second, then twice that
PROMPT = """\
Below are a document, a summary as reference and a proposed summary. Decide whether everything that
the proposed summary says follows from the document. Go by the document alone, not by what else you
know. A text that differs from the reference may still be right, as long as nothing in it is wrong
or not in the document.

Document:\n{}\n\nReference:\n{}\n\nProposed text:\n{}

First explain in a few sentences. Then write a last line, which is "Conclusion: True" if the
document supports all of the proposed text, or "Conclusion: False" if any of it is not in there.
"""
_MARKS = r"(?:[^\w\n]|_)*"
_CONCLUSION = re.compile(rf"(?im)^{_MARKS}conclusion{_MARKS}:{_MARKS}(true|false){_MARKS}$")
_NAME = re.compile(r"(?<=[\w,;)] )[^\W\d_]\w*")


class HallucinationTask(HallucinationOptions):
    headlines = ("accuracy", "undecided", "unjudged", "unsupported_names")

    def cells(self, subject: Subject) -> list[Cell]:
        if not self.files:
            raise ClearheadError("hallucination needs files: give --hallucination.files FILE.jsonl")
        if len({Path(file).name for file in self.files}) < len(self.files):
            raise ClearheadError("two files have one name, by which tables name them: rename one")
        self.judge.check()
        by = {"judge": self.judge.model} if self.judge.model else {}
        cells: list[Cell] = []
        for file in self.files:
            common = {"file": Path(file).name, "digest": digest_of(self._rows(file))[:12], **by}
            for length in subject.lengths:
                subject.check_length(length)
                cells.append({**common, "length": length})
                self.asked(subject, cells[-1])  # refuses a length without room
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        rows, documents, prompts = self.asked(subject, cell)
        answers = subject.reader.ask(prompts, new_tokens=self.summary_tokens)
        # Models that only continue texts go on to the next document by themselves.
        written = [subject.decode(answer.written).strip() for answer in answers]
        texts = [text.partition("\n\n")[0].rstrip() for text in written]
        questions = map(PROMPT.format, documents, (row.label for row in rows), texts)
        return lines_of(
            self.headlines,
            **(verdicts(self.judge, list(questions)) if self.judge.model else {}),
            **grounding(texts, documents),
            items=len(rows),
            cut=fmean(a.text != b for a, b in zip(rows, documents, strict=True)),
            texts=texts,
        )

    def asked(self, subject: Subject, cell: Cell) -> tuple[list[Row], list[str], list[Prompt]]:
        """Rows, the part of each document that fits, and prompts."""
        (file,) = [file for file in self.files if Path(file).name == cell["file"]]
        rows, documents, prompts = list(self._rows(file)), [], []
        if len(rows) > self.samples:
            rows = SeededChoices(f"hallucination {subject.seed}").sample(rows, self.samples)
        rows.sort(key=lambda row: (len(row.text), row.text))  # like ones run together
        for row in rows:
            start, middle, end = subject.ids(_OPENING, row.text, "\n\nSummary:")
            room = cell["length"] - self.summary_tokens - len(start) - len(end)
            if room < 1:
                taken = f"{len(start + end)} tokens of a prompt, {self.summary_tokens} of a summary"
                raise ClearheadError(f"length {cell['length']} has no room for {taken}: give more")
            documents.append(row.text if len(middle) <= room else subject.decode(middle[:room]))
            prompts.append(Prompt((*start, *middle[:room]), end))
        return rows, documents, prompts

    def _rows(self, file: str) -> list[Row]:
        fields = Task(name=file, text=self.text_field, label=self.label_field)
        rows = labelled_rows(file, fields, "--hallucination.")
        for row in rows:
            if not row.text.strip() or not isinstance(row.label, str):
                raise ClearheadError(f"{row.where}: document or summary is empty: give both")
        return rows


def grounding(texts: Sequence[str], documents: Sequence[str]) -> dict[str, float | None]:
    """`unsupported_names`, the share of the texts' names that their documents lack, and
    `names_above_chance`, the share that the next document lacks, less the former; or None."""
    known = [set(re.findall(r"\w+", document.casefold())) for document in documents]
    others = [
        next((other for other in (*known[n:], *known[:n]) if other != mine), mine)
        for n, mine in enumerate(known)
    ]
    named = list(map(names, texts))
    if not (count := sum(map(len, named))):
        return dict.fromkeys(("unsupported_names", "names_above_chance"))
    missing, chance = (
        sum(len(some - words) for some, words in zip(named, side, strict=True)) / count
        for side in (known, others)
    )
    return {"unsupported_names": missing, "names_above_chance": chance - missing}


def names(text: str) -> set[str]:
    """Capitalised words that follow a word or comma of their sentence, in lower case; never I."""
    return {one.casefold() for one in _NAME.findall(text) if one[0].isupper() and one != "I"}


def verdicts(config: JudgeConfig, prompts: Sequence[str]) -> dict[str, Any]:
    """The judge's `accuracy`, the share of supported texts among the decided, and counts of replies
    without one conclusion and of texts without a reply to three requests; after three of these in a
    row no more are sent."""
    from huggingface_hub import InferenceClient

    # Without a key the client would send the user's Hugging Face token.
    key = os.environ.get(config.key_variable, "").strip() or "none"
    client = InferenceClient(base_url=config.endpoint, api_key=key, timeout=config.timeout)
    settings: Any = {"model": config.model, "max_tokens": config.new_tokens, "temperature": 0}
    failures, replies = dict[str, None](), list[str | None]()

    def clean(words: str) -> str:  # a server may echo its key
        return words if key == "none" else words.replace(key, "[key]")

    for prompt in prompts:
        replies.append(None)
        gone = replies[-1 - TRIES :].count(None) > TRIES
        for attempt in range(0 if gone else TRIES):
            time.sleep(PAUSE * attempt)
            try:
                message = {"role": "user", "content": prompt}
                answer = client.chat_completion([message], **settings)
                replies[-1] = clean(str(answer.choices[0].message.content or ""))
                break
            except Exception as error:  # the client's, the network's: they share no base class
                words = f"{type(error).__name__}: {' '.join(str(error).split())}"
                failures[clean(words)[:200]] = None
    conclusions = [{one.lower() for one in _CONCLUSION.findall(one or "")} for one in replies]
    decided = [float("true" in one) for one in conclusions if len(one) == 1]
    if unjudged := replies.count(None):
        say(f"{unjudged} of {len(replies)} texts are unjudged: {'; '.join(failures)}")
    return {
        **({"accuracy": fmean(decided), "accuracy_by_item": decided} if decided else {}),
        "undecided": len(replies) - len(decided) - unjudged,
        "unjudged": unjudged,
        "judge_failures": [*failures],
        "replies": replies,
    }
