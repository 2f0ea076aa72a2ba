"""Many-shot in-context learning with constrained decoding, and its robustness to order.

After Bertsch et al. (arXiv 2405.00200) and the Differential Transformer (arXiv 2410.05258, section
3.5): labelled texts fill the context, a text is asked for, and the answer is one of all the labels'
names. Constrained decoding is exact here: every label is scored by the log-likelihood of its name
and the end of line, summed over its tokens, and the likeliest is the answer. Orders permute one set
of demonstrations, which a cell draws once.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

from clearhead.data.seeded_choices import SeededChoices
from clearhead.errors import ClearheadError, choose
from clearhead.eval.demonstrations import (
    ORDERS,
    Example,
    Tokens,
    Wording,
    fill,
    load_examples,
)
from clearhead.eval.options import FILL, ShotsOptions
from clearhead.eval.task import EvalTask, check_count, parted
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.records.intervals import wilson
from clearhead.records.runs import Line


class ShotsTask(EvalTask, ShotsOptions):
    headlines = ("accuracy", "margin", "variance")

    def cells(self, subject: Subject) -> list[Cell]:
        check_count(queries=self.queries, permutations=self.permutations)
        words, orders = parted(self.counts), parted(self.orders)
        for order in orders:
            choose("order", order, ORDERS)
        counts = [_count(word) for word in words]
        if not counts or not orders:
            raise ClearheadError("counts and orders of shots are none: give at least one of each")
        setting = _Setting(self, subject)
        for length in subject.lengths:
            for count in counts:
                setting.shown(length, count)
            subject.check_length(length)
        data, digest = Path(self.data).name.partition(".")[0], setting.examples.digest
        return [
            {"data": data, "digest": digest, "shots": word, "order": order, "length": length}
            for word in words
            for order in orders
            for length in subject.lengths
        ]

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        setting = _Setting(self, subject)
        queries, labels = setting.examples.queries, setting.examples.labels
        shown = setting.shown(cell["length"], _count(cell["shots"]))
        known: dict[Tokens, list[int]] = {}
        right = []  # [permutations][queries]
        for number in range(self.permutations):
            draws = SeededChoices(f"shots {subject.seed} {cell['order']} {number}")
            context = setting.context(ORDERS[cell["order"]](shown, draws))
            if context not in known:  # of few shots some orders are the same
                known[context] = setting.answers(context, advanced)
            pairs = zip(known[context], queries, strict=True)
            right.append([answer == query.label for answer, query in pairs])
        accuracies = [fmean(one) for one in right]
        by_query = [fmean(one) for one in zip(*right, strict=True)]
        # Orders ask the same queries: those are the trials, not their repetitions.
        low, high = wilson(sum(by_query), self.queries)
        several = len(known) > 1
        return {
            "accuracy": fmean(accuracies),
            "low": low,
            "high": high,
            "accuracy_by_item": by_query,
            "margin": max(accuracies) - min(accuracies) if several else None,
            "variance": variance(accuracies) if several else None,
            "accuracies": accuracies,
            "chance": 1 / len(labels),
            "commonest": max(Counter(query.label for query in queries).values()) / self.queries,
            "labels": len(labels),
            "labels_shown": len({example.label for example in shown}),
            "demonstrations": len(shown),
            "prompt_tokens": len(context) + fmean(map(len, setting.questions)),
            "trials": self.queries,
        }


class _Setting:
    """A task's examples as a subject's tokens."""

    def __init__(self, task: ShotsTask, subject: Subject) -> None:
        self._subject = subject
        self.examples = load_examples(
            task.data,
            task.test,
            text_field=task.text_field,
            label_field=task.label_field,
            queries=task.queries,
            draws=SeededChoices(f"shots {subject.seed} queries"),
        )
        self.wording = Wording(subject.ids, subject.begin, self.examples.labels)
        self.questions = [self.wording.question(query.text) for query in self.examples.queries]

    def shown(self, length: int, count: int | None) -> list[Example]:
        """The demonstrations beside which the longest query and label still fit the length.

        One draw for all lengths: the demonstrations of a shorter one are among a longer one's.
        """
        wording, draws = self.wording, SeededChoices(f"shots {self._subject.seed} demonstrations")
        rest = max(map(len, self.questions)) + max(map(len, wording.answers)) + len(wording.begin)
        return fill(self.examples.pool, wording, room=length - rest, count=count, draws=draws)

    def context(self, shown: Sequence[Example]) -> Tokens:
        """Everything before the query."""
        pieces = [self.wording.begin, *map(self.wording.demonstration, shown)]
        return tuple(token for piece in pieces for token in piece)

    def answers(self, context: Tokens, advanced: Advanced) -> list[int]:
        """The likeliest label of each query; of equally likely ones the first."""
        labels = []
        for question in self.questions:
            scores = self._subject.reader.weigh(Prompt(context, question), self.wording.answers)
            labels.append(max(range(len(scores)), key=scores.__getitem__))
            advanced(1)
        return labels


def _count(word: str) -> int | None:
    if word == FILL:
        return None
    if not word.isdecimal() or int(word) < 1:
        raise ClearheadError(f"counts of shots: {word!r} is no whole number above 0, nor {FILL}")
    return int(word)
