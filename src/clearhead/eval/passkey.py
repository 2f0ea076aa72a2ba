"""Passkey retrieval: a number somewhere in repeated filler, asked for at the end.

The CoCA paper's prompt (arXiv 2309.08646v3, appendix B.1) or landmark attention's. Neither the rule
for scoring nor where the key stood is in the CoCA paper. Here `accuracy` counts an answer that has
the key anywhere in it, and `forced` one whose tokens are each the likeliest (teacher forcing after
the answer's lead).
"""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

from clearhead.data.retrieval import LANDMARK, PAPER, Wording, number
from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.eval.options import PasskeyOptions
from clearhead.measure.answers import Answer, Prompt
from clearhead.measure.task import Cell, Subject
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line

DIGITS = 5  # of a key, and of a magic number


def by_depth(lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """A cell for each length and depth: of growing depths, as filler that is cached only grows."""
    return [{"length": length, "depth": depth} for length in lengths for depth in sorted(depths)]


class PasskeyTask(PasskeyOptions):
    drawn: ClassVar[bool] = True
    headlines = ("accuracy", "forced_tokens")

    def cells(self, subject: Subject) -> list[Cell]:
        cells = by_depth(subject.lengths, self.depths)
        for length in subject.lengths:
            key = number(SeededChoices("any"), DIGITS, evaluation=True)
            self._prompt(subject, key, length, 0)
            subject.check_length(length + self._new_tokens)
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        draws = SeededChoices(f"passkey {subject.seed} {cell['length']} {cell['depth']}")
        keys = [number(draws, DIGITS, evaluation=True) for _ in range(self.trials)]
        prompts, answers, leads = [], [], []
        for key in keys:
            text = self._prompt(subject, key, cell["length"], cell["depth"])
            ids, lead, spelt = subject.ids(text, self._wording.lead, f" {key}")
            prompts.append(Prompt(ids[:-1], ids[-1:]))
            answers.append((*lead, *spelt))
            leads.append(len(lead))
        replies = subject.reader.ask(prompts, answers, new_tokens=self._new_tokens)
        return lines_of(
            self.headlines,
            **scores(subject, replies, keys, leads),
            trials=self.trials,
            prompt_tokens=fmean(len(prompt.ids) for prompt in prompts),
        )

    @property
    def _wording(self) -> Wording:
        return {"paper": PAPER, "landmark": LANDMARK}[self.wording]

    @property
    def _new_tokens(self) -> int:
        return self._wording.new_tokens if self.new_tokens is None else self.new_tokens

    def _prompt(self, subject: Subject, key: str, length: int, depth: float) -> str:
        """The prompt of at most `length` tokens, as much filler in it as fits."""

        def tokens(repeats: int) -> int:
            return len(subject.ids(self._wording.prompt(key, 0, repeats))[0])

        bare, each = tokens(0), tokens(2) - tokens(1)
        if bare > length:
            raise ClearheadError(
                f"a passkey prompt takes {bare} tokens without any filler: more than the "
                f"length {length}; give longer lengths, or leave passkey out"
            )
        repeats = (length - bare) // each
        while repeats and tokens(repeats) > length:
            repeats -= 1
        before = round(depth * repeats)
        return self._wording.prompt(key, before, repeats - before)


def scores(
    subject: Subject,
    found: Sequence[Answer],
    keys: Sequence[str],
    leads: Sequence[int],
    together: int = 1,
) -> dict[str, Any]:
    """Shares of numbers found, and by item, for the standard error of drawing items.

    Args:
        leads: tokens of a forced answer that come before its number.
        together: neighbouring numbers that were asked of one text: they make one item.
    """
    written = [re.findall(r"\d+", subject.decode(answer.written)) for answer in found]
    named = [key in numbers for key, numbers in zip(keys, written, strict=True)]
    by_number = [a.right[lead:] for a, lead in zip(found, leads, strict=True)]
    tokens = [one for right_tokens in by_number for one in right_tokens]
    starts = range(0, len(found), together)
    return {
        "accuracy": sum(named) / len(found),
        "forced": sum(map(all, by_number)) / len(found),
        "forced_tokens": fmean(tokens),
        "answer_loss": fmean(sum(a.loss[n:]) for a, n in zip(found, leads, strict=True)),
        "accuracy_by_item": [fmean(named[i : i + together]) for i in starts],
        "forced_tokens_by_item": [
            fmean(one for right_tokens in by_number[i : i + together] for one in right_tokens)
            for i in starts
        ],
    }
