"""Contextual hallucination: statements of a generated text that its document does not support.

After the Differential Transformer (arXiv 2410.05258, section 3.6) and Lookback Lens (2407.07071):
answers to questions on documents, and summaries, by greedy decoding. Accuracy is the share of texts
that a judge finds supported by the document. Without a judge there are `grounding_metrics` only.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from clearhead.data.corpus import fingerprint_of
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.document_prompts import (
    Case,
    DocumentPrompt,
    PromptTemplate,
    digest_of,
    load_cases,
    stop_of,
)
from clearhead.eval.grounding_metrics import grounding_metrics
from clearhead.eval.judges import Judge, LocalJudge, RemoteJudge, conclusion, question_to
from clearhead.eval.options import HallucinationOptions
from clearhead.eval.task import EvalTask, Subject, check_count, check_files
from clearhead.measure.task import Advanced, Cell
from clearhead.records import jsonl
from clearhead.records.runs import Line


class JsonlCache:
    """JSON lines by their "key", a hash of everything that determines the rest of the line.

    Args:
        path: the file, which need not be there yet; None keeps lines in memory only. A last
            line that an interruption tore is dropped.

    Raises:
        ClearheadError: a file that holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            jsonl.each([path], self._know, what="text or verdict of an evaluation")
        except ClearheadError as error:
            raise ClearheadError(f"{error}: move the file away") from error

    @property
    def advice(self) -> str:
        """The end of an error message: what is cached, and how to go on."""
        if self._path is None:
            return "nothing was kept: give --records to go on from what is done"
        return f"what is written and judged is in {self._path}, and the same command goes on"

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def line(self, key: str) -> dict[str, Any]:
        """The line of a key that is there."""
        return self._lines[key]

    def add(self, key: str, **line: Any) -> None:
        """Add a line, and append it to the file.

        Raises:
            ClearheadError: where the file cannot be written.
        """
        self._lines[key] = {"key": key, **line}
        if self._path is not None:
            jsonl.append(self._path, self._lines[key])

    def _know(self, line: dict[str, Any]) -> None:
        self._lines[str(line["key"])] = line


def key_of(*parts: Any) -> str:
    """A key that tells these parts from any others."""
    return fingerprint_of(*parts)[:32]


class GeneratedText(NamedTuple):
    """A text; `ended` is False where the model had no tokens left."""

    text: str
    ended: bool


class Verdict(NamedTuple):
    """`supported` is None where the judge left it undecided; `judge` names the model."""

    supported: bool | None
    judge: str


class JudgedGeneration:
    """Texts generated for prompts, and verdicts on them; cached ones are not made again.

    Args:
        file: the name of the data, for people who read the cache.
        advanced: called with the number of texts or verdicts just made.
    """

    def __init__(
        self, prompts: Sequence[DocumentPrompt], cache: JsonlCache, file: str, advanced: Advanced
    ) -> None:
        self._prompts, self._cache, self._file, self._advanced = prompts, cache, file, advanced

    def write(
        self,
        subject: Subject,
        *,
        tokens: Sequence[int],
        stops: Sequence[str | None],
        before: Callable[[], None] | None,
    ) -> list[GeneratedText]:
        """The text that the model generates for each prompt, by greedy decoding.

        Args:
            tokens: of each text, at most. stops: what ends each, where the model does not.
            before: called first if there is anything to write.
        """
        keys = [
            key_of("text", subject.weights, str(subject.model.dtype), one.prompt.ids, most, stop)
            for one, most, stop in zip(self._prompts, tokens, stops, strict=True)
        ]
        new = self._new(keys)
        if new and before is not None:
            before()
        for most, stop in dict.fromkeys((tokens[place], stops[place]) for place in new):
            mine = [place for place in new if (tokens[place], stops[place]) == (most, stop)]
            for answered in subject.reader.each(
                [self._prompts[place].prompt for place in mine],
                [()] * len(mine),
                new_tokens=most,
                enough=_enough(subject, stop),
            ):
                for number, answer in answered.items():
                    text = subject.decode(answer.written)
                    self._save(
                        keys[mine[number]],
                        mine[number],
                        references=self._prompts[mine[number]].case.references,
                        text=_until(text, stop),
                        ended=len(answer.written) < most or _stopped(text, stop),
                    )
                self._advanced(len(answered))
        return [GeneratedText(line["text"], line["ended"]) for line in map(self._cache.line, keys)]

    def judge(self, judge: Judge, texts: Sequence[GeneratedText]) -> list[Verdict]:
        """The judge's verdict on each text.

        Raises:
            ClearheadError: a judge that gives no reply, and what is left of the work.
        """
        asked = [
            question_to(one.case, one.document, generated.text)
            for one, generated in zip(self._prompts, texts, strict=True)
        ]
        keys = [key_of("verdict", judge.identity, prompt) for prompt in asked]
        new = self._new(keys)
        replies = judge.replies([asked[place] for place in new]) if new else iter(())
        try:
            for number, reply in replies:
                self._save(
                    keys[new[number]],
                    new[number],
                    text=texts[new[number]].text,
                    judge=reply.model,
                    supported=conclusion(reply.text),
                    reply=reply.text,
                )
                self._advanced(1)
        except ClearheadError as error:
            raise ClearheadError(f"{error}; {self._cache.advice}") from error
        return [Verdict(line["supported"], line["judge"]) for line in map(self._cache.line, keys)]

    def _new(self, keys: Sequence[str]) -> list[int]:
        """The first place of each key that is not cached."""
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        return sorted(place for key, place in first.items() if key not in self._cache)

    def _save(self, key: str, place: int, **line: Any) -> None:
        self._cache.add(key, file=self._file, question=self._prompts[place].case.question, **line)


def verdicts(found: Sequence[Verdict]) -> dict[str, Any]:
    """`accuracy`, the share of supported texts among the decided."""
    decided = [one.supported for one in found if one.supported is not None]
    out: dict[str, Any] = {
        "undecided": len(found) - len(decided),
        "judged_by": sorted({one.judge for one in found}),
    }
    if decided:
        out.update(accuracy=sum(decided) / len(decided), accuracy_by_item=decided)
    return out


def _enough(subject: Subject, stop: str | None) -> Callable[[Sequence[int]], bool] | None:
    return None if stop is None else lambda written: _stopped(subject.decode(written), stop)


def _stopped(text: str, stop: str | None) -> bool:
    return stop is not None and stop in text.lstrip()


def _until(text: str, stop: str | None) -> str:
    """A text up to where it stops, without the space around it."""
    text = text.strip()
    return text if stop is None else text.partition(stop)[0].rstrip()


class HallucinationTask(EvalTask, HallucinationOptions):
    headlines = (
        "accuracy",
        "undecided",
        "answer_contained",
        "token_f1",
        "unsupported_numbers",
        "unsupported_names",
        "bigram_support",
    )

    def cells(self, subject: Subject) -> list[Cell]:
        check_files("hallucination", self.files, "nq-open-oracle.jsonl.gz")
        check_count(
            samples=self.samples,
            answer_tokens=self.answer_tokens,
            summary_tokens=self.summary_tokens,
        )
        self.judge.check()
        template = self._template(subject)
        for file in self.files:
            for together in self._together(subject, file):
                # At the shortest length the least is left of a document.
                template.check(together, self._room(together[0], min(subject.lengths)))
        for length in subject.lengths:
            subject.check_length(length)
        by = {"judge": self.judge.name} if self.judge.model else {}
        return [
            {"file": Path(file).name, "digest": digest_of(file), **by, "length": length}
            for file in self.files
            for length in subject.lengths
        ]

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        (file,) = [file for file in self.files if Path(file).name == cell["file"]]
        template = self._template(subject)
        groups = [
            template.prompts(together, self._room(together[0], cell["length"]))
            for together in self._together(subject, file)
        ]
        # Neighbours run together: of like length, and those on one document side by side.
        groups.sort(key=lambda group: max(len(one.prompt.ids) for one in group))
        prompts = [one for group in groups for one in group]
        judge = self._open_judge(subject)
        work = JudgedGeneration(prompts, JsonlCache(subject.kept), cell["file"], advanced)
        texts = work.write(
            subject,
            tokens=[self._new_tokens(one.case) for one in prompts],
            stops=[None if self.chat else stop_of(one.case) for one in prompts],
            # A judge that is not there is found out before the long part.
            before=None if judge is None else judge.check,
        )
        return {
            **({} if judge is None else verdicts(work.judge(judge, texts))),
            **grounding_metrics([one.text for one in texts], prompts),
            "items": len(prompts),
            "empty": sum(not one.text for one in texts),
            "ended": sum(one.ended for one in texts) / len(texts),
            "cut": sum(one.cut for one in prompts) / len(prompts),
            "prompt_tokens": fmean(len(one.prompt.ids) for one in prompts),
        }

    def _template(self, subject: Subject) -> PromptTemplate:
        return PromptTemplate(subject.tokenizer, subject.encoder, chat=self.chat)

    def _together(self, subject: Subject, file: str) -> list[list[Case]]:
        """The cases that are asked, those on one document together."""
        cases = load_cases(file)
        if len(cases) > self.samples:
            draws = SeededChoices(f"hallucination {subject.seed} {digest_of(file)}")
            places = draws.sample(range(len(cases)), self.samples)
            cases = [cases[place] for place in sorted(places)]
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.document, case.kind), []).append(case)
        return list(groups.values())

    def _room(self, case: Case, length: int) -> int:
        """Tokens of a length that are left to the prompt."""
        return length - self._new_tokens(case)

    def _new_tokens(self, case: Case) -> int:
        return self.answer_tokens if case.kind == "answer" else self.summary_tokens

    def _open_judge(self, subject: Subject) -> Judge | None:
        if not self.judge.model:
            return None
        if self.judge.endpoint:
            return RemoteJudge(self.judge)
        return _local(self.judge, device=subject.model.device, batch_tokens=subject.batch_tokens)


_local = lru_cache(maxsize=1)(LocalJudge)  # loaded once for all cells
