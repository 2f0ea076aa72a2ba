"""Contextual hallucination: what a model says of a document that the document does not say.

After the Differential Transformer (arXiv 2410.05258, section 3.6) and Lookback Lens (2407.07071):
answers to questions on documents, and summaries, by greedy decoding; a judge says of each whether
it holds to the document, and accuracy is the share that does. Without a judge there are counts of
words only, each named for what it is.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from clearhead.data.draws import Draws
from clearhead.eval.briefs import Frame, stop_of
from clearhead.eval.cases import Case, load_cases, local
from clearhead.eval.fingerprints import check_files, file_digest
from clearhead.eval.judges import Judge, LocalJudge, RemoteJudge
from clearhead.eval.kept import Kept
from clearhead.eval.options import HallucinationOptions
from clearhead.eval.support import Said, words
from clearhead.eval.task import Advanced, Cell, Subject, check_count
from clearhead.eval.written import Work, verdicts


@dataclass(frozen=True, kw_only=True)
class HallucinationTask(HallucinationOptions):
    """Answers and summaries that hold to their documents, by a judge or by their words."""

    headlines: ClassVar[tuple[str, ...]] = (
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
        frame = self._frame(subject)
        for file in self.files:
            for together in self._together(subject, file):
                # At the shortest length the least is left of a document.
                frame.check(together, self._room(together[0], min(subject.lengths)))
        for length in subject.lengths:
            subject.check_length(length)
        by = {"judge": self.judge.name} if self.judge.model else {}
        return [
            {"file": Path(file).name, "digest": file_digest(local(file)), **by, "length": length}
            for file in self.files
            for length in subject.lengths
        ]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> dict[str, Any]:
        (file,) = [file for file in self.files if Path(file).name == cell["file"]]
        frame = self._frame(subject)
        groups = [
            frame.briefs(together, self._room(together[0], cell["length"]))
            for together in self._together(subject, file)
        ]
        # Neighbours run together: of like length, and those on one document side by side.
        groups.sort(key=lambda briefs: max(len(brief.prompt.ids) for brief in briefs))
        briefs = [brief for group in groups for brief in group]
        kept = Kept(subject.kept)
        judge = self._open_judge(subject)
        work = Work(briefs, kept, cell["file"], advanced)
        texts = work.write(
            subject,
            tokens=[self._new_tokens(brief.case) for brief in briefs],
            stops=[None if self.chat else stop_of(brief.case) for brief in briefs],
            # A judge that is not there is found out before the long part.
            before=None if judge is None else judge.check,
        )
        return {
            **({} if judge is None else verdicts(work.judge(judge, texts))),
            **words(
                [Said(one.text, b.case, b.document) for one, b in zip(texts, briefs, strict=True)]
            ),
            "items": len(briefs),
            "empty": sum(not one.text for one in texts),
            "ended": sum(one.ended for one in texts) / len(texts),
            "cut": sum(brief.cut for brief in briefs) / len(briefs),
            "prompt_tokens": fmean(len(brief.prompt.ids) for brief in briefs),
        }

    def _frame(self, subject: Subject) -> Frame:
        return Frame(subject.tokenizer, subject.encode, subject.begin, chat=self.chat)

    def _together(self, subject: Subject, file: str) -> list[list[Case]]:
        """The cases that are asked, those on one document together."""
        cases = load_cases(file)
        if len(cases) > self.samples:
            draws = Draws(f"hallucination {subject.seed} {file_digest(local(file))}")
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
