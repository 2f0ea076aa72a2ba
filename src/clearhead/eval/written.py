"""Texts that a model writes, and what a judge says of them: each kept as it is made."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError
from clearhead.eval.briefs import Brief
from clearhead.eval.judges import Judge, conclusion, question_to
from clearhead.eval.kept import Kept, key_of
from clearhead.eval.task import Advanced, Subject, wilson


class Written(NamedTuple):
    """A text, and whether the model ended it, or had no tokens left."""

    text: str
    ended: bool


class Verdict(NamedTuple):
    """Whether a text is supported, None where that was left undecided; and who says so."""

    supported: bool | None
    judge: str


class Work:
    """Writing and judging on some briefs; what is kept is not done again.

    Args:
        file: the name of the data, for people who read what is kept.
        advanced: told how many texts or verdicts were just made.
    """

    def __init__(self, briefs: Sequence[Brief], kept: Kept, file: str, advanced: Advanced) -> None:
        self._briefs, self._kept, self._file, self._advanced = briefs, kept, file, advanced

    def write(
        self,
        subject: Subject,
        *,
        tokens: Sequence[int],
        stops: Sequence[str | None],
        before: Callable[[], None] | None,
    ) -> list[Written]:
        """What the model writes to each brief, by greedy decoding.

        Args:
            tokens: of each text, at most. stops: what ends each, where the model does not.
            before: called first if there is anything to write.
        """
        keys = [
            key_of("text", subject.weights, str(subject.model.dtype), brief.prompt.ids, most, stop)
            for brief, most, stop in zip(self._briefs, tokens, stops, strict=True)
        ]
        new = self._new(keys)
        if new and before is not None:
            before()
        for most, stop in dict.fromkeys((tokens[place], stops[place]) for place in new):
            mine = [place for place in new if (tokens[place], stops[place]) == (most, stop)]
            for answered in subject.reader.each(
                [self._briefs[place].prompt for place in mine],
                [()] * len(mine),
                new_tokens=most,
                enough=_enough(subject, stop),
            ):
                for number, answer in answered.items():
                    text = subject.decode(answer.written)
                    self._keep(
                        keys[mine[number]],
                        mine[number],
                        references=self._briefs[mine[number]].case.references,
                        text=_until(text, stop),
                        ended=len(answer.written) < most or _stopped(text, stop),
                    )
                self._advanced(len(answered))
        return [Written(line["text"], line["ended"]) for line in map(self._kept.line, keys)]

    def judge(self, judge: Judge, texts: Sequence[Written]) -> list[Verdict]:
        """What the judge says of each text.

        Raises:
            ClearheadError: a judge that gives no reply, and what is left of the work.
        """
        asked = [
            question_to(brief.case, brief.document, one.text)
            for brief, one in zip(self._briefs, texts, strict=True)
        ]
        keys = [key_of("verdict", judge.identity, prompt) for prompt in asked]
        new = self._new(keys)
        replies = judge.replies([asked[place] for place in new]) if new else iter(())
        try:
            for number, reply in replies:
                self._keep(
                    keys[new[number]],
                    new[number],
                    text=texts[new[number]].text,
                    judge=reply.model,
                    supported=conclusion(reply.text),
                    reply=reply.text,
                )
                self._advanced(1)
        except ClearheadError as error:
            raise ClearheadError(f"{error}; {self._kept.advice}") from error
        return [Verdict(line["supported"], line["judge"]) for line in map(self._kept.line, keys)]

    def _new(self, keys: Sequence[str]) -> list[int]:
        """The first place of each key that is not kept."""
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        return sorted(place for key, place in first.items() if key not in self._kept)

    def _keep(self, key: str, place: int, **line: Any) -> None:
        self._kept.add(key, file=self._file, question=self._briefs[place].case.question, **line)


def verdicts(found: Sequence[Verdict]) -> dict[str, Any]:
    """`accuracy`, the share of supported texts among the decided, with its 95 % interval."""
    decided = [one.supported for one in found if one.supported is not None]
    out: dict[str, Any] = {
        "undecided": len(found) - len(decided),
        "judged_by": sorted({one.judge for one in found}),
    }
    if decided:
        low, high = wilson(sum(decided), len(decided))
        out.update(accuracy=sum(decided) / len(decided), low=low, high=high)
    return out


def _enough(subject: Subject, stop: str | None) -> Callable[[Sequence[int]], bool] | None:
    return None if stop is None else lambda written: _stopped(subject.decode(written), stop)


def _stopped(text: str, stop: str | None) -> bool:
    return stop is not None and stop in text.lstrip()


def _until(text: str, stop: str | None) -> str:
    """A text up to where it stops, without the space around it."""
    text = text.strip()
    return text if stop is None else text.partition(stop)[0].rstrip()
