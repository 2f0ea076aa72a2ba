"""Multi-needle retrieval (arXiv 2410.05258, section 3.4, after LWM and Gemini 1.5).

N cities have magic numbers in a text; R of them are asked for. The papers do not say how the R
answers are asked for and placed: here each is asked by itself after the same context (which is read
once), and the R needles stand together at the depth.
"""

import re

from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.haystack import Haystack, haystack, question_of
from clearhead.eval.options import NeedlesOptions
from clearhead.eval.passkey import scores
from clearhead.eval.task import EvalTask, by_depth, check_count, parted
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.runs import Line


class NeedlesTask(EvalTask, NeedlesOptions):
    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        check_count(samples=self.samples, new_tokens=self.new_tokens)
        found: list[Cell] = [
            {**cell, "needles": needles, "queries": queries}
            for needles, queries in map(_size, parted(self.grid))
            for cell in by_depth(subject.lengths, self.depths)
        ]
        for cell in found:
            if cell["depth"] == max(self.depths):
                self._haystack(subject, cell, 0)
                subject.check_length(cell["length"] + self.new_tokens)
        return found

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        stacks = [self._haystack(subject, cell, sample) for sample in range(self.samples)]
        prompts = [prompt for stack in stacks for prompt in stack.prompts(subject)]
        numbers = [fact.number for stack in stacks for fact in stack.asked]
        answers = [question_of(subject, fact)[1] for stack in stacks for fact in stack.asked]
        found = subject.reader.ask(prompts, answers, new_tokens=self.new_tokens, advanced=advanced)
        by_query = scores(subject, found, numbers, [0] * len(found), cell["queries"])
        each = [
            re.findall(r"\d+", subject.decode(answer.written))[:1] == [number]
            for answer, number in zip(found, numbers, strict=True)
        ]
        rows = [each[i : i + cell["queries"]] for i in range(0, len(each), cell["queries"])]
        return {
            **by_query,
            "all_first": sum(map(all, rows)) / len(rows),
            "samples": self.samples,
            "trials": len(found),
        }

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> Haystack:
        # The same sample at every depth has the same filler and facts.
        label = f"needles {subject.seed} {cell['length']} {cell['needles']} {sample}"
        return haystack(
            subject,
            SeededChoices(label),
            length=cell["length"],
            depth=cell["depth"],
            needles=cell["needles"],
            queries=cell["queries"],
            digits=self.digits,
            filler=self.filler,
        )


def _size(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", word)
    if match is None:
        raise ClearheadError(f"grid {word!r} is not NxR: for example 4x2, 2 of 4 needles asked for")
    needles, queries = int(match[1]), int(match[2])
    if not 1 <= queries <= needles:
        raise ClearheadError(
            f"grid {word!r}: from 1 to {needles} of {needles} needles are asked for"
        )
    return needles, queries
