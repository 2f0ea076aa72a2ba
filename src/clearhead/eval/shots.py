"""Many-shot in-context learning with constrained decoding, and its robustness to order, after
Bertsch et al. (arXiv 2405.00200) and the Differential Transformer (arXiv 2410.05258, section 3.5).
The answer is the likeliest label; orders permute one set of demonstrations. Each is "text: …",
"label: …" and an empty line, tokenised in three pieces so that a label always has the same tokens.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from math import fsum
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

from clearhead.data import DataConfig, labelled
from clearhead.data.readers import HUB
from clearhead.data.seeded import SeededChoices
from clearhead.errors import ClearheadError
from clearhead.measure.answers import Ids, Prompt
from clearhead.measure.sweep import Cell, Subject
from clearhead.records.cells import lines_of
from clearhead.records.identity import digest_of
from clearhead.records.intervals import wilson
from clearhead.records.runs import Line
from clearhead.settings.data import Task
from clearhead.settings.eval import FILL, ShotsOptions, parted
from clearhead.terminal import say

_read_once = lru_cache(maxsize=8)(labelled.read_rows)


def labelled_rows(source: str, fields: Task, options: str) -> list[labelled.Row]:
    """Rows of a file, or of a data set, read once; `options` prefixes those of their fields."""
    about: Any = {"cache": DataConfig().cache_folder, "progress": say, "options": options}
    if source.startswith(HUB):
        return _read_once(source, fields, **about)
    return labelled.read_rows(source, fields, **about)


class ShotsTask(ShotsOptions):
    headlines = ("accuracy", "margin", "variance")

    def cells(self, subject: Subject) -> list[Cell]:
        setting = Setting(self, subject)
        name = Path(self.data).name.partition(".")[0]
        common = {"data": name, "digest": setting.digest, "order": "random"}
        cells: list[Cell] = []
        for word in parted(self.counts):
            for length in subject.lengths:
                setting.shown(length, word)
                subject.check_length(length)
                cells.append({**common, "shots": word, "length": length})
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        setting = Setting(self, subject)
        shown = setting.shown(cell["length"], cell["shots"])
        label = f"shots {subject.seed} random"
        draws = [SeededChoices(f"{label} {n}") for n in range(self.permutations)]
        contexts = [setting.context(one.sample(shown, len(shown))) for one in draws]
        right_answers = cache(setting.right_answers)  # of few shots some orders are the same
        right = [right_answers(context) for context in contexts]  # [permutations][queries]
        accuracies = [fmean(one) for one in right]
        by_query = [fmean(one) for one in zip(*right, strict=True)]
        # Orders ask the same queries: those are the trials, not their repetitions.
        low, high = wilson(sum(by_query), self.queries)
        several = len(set(contexts)) > 1
        commonest = max(Counter(query.label for query in setting.queries).values())
        return lines_of(
            self.headlines,
            accuracy=fmean(accuracies),
            low=low,
            high=high,
            accuracy_by_item=by_query,
            margin=max(accuracies) - min(accuracies) if several else None,
            variance=variance(accuracies) if several else None,
            accuracies=accuracies,
            chance=1 / len(setting.labels),
            commonest=commonest / self.queries,
            labels=len(setting.labels),
            labels_shown=len({example.label for example in shown}),
            demonstrations=len(shown),
            prompt_tokens=len(contexts[0]) + fmean(map(len, setting.questions)),
            trials=self.queries,
        )


class Example(NamedTuple):
    """A text on one line, and the number of its label."""

    text: str
    label: int


class Setting:
    """A task's examples in the model's tokens, white space as single spaces. No query's text is in
    the `pool` of demonstrations. An answer is a label with its end of line, so that no label's
    likelihood is part of another's."""

    def __init__(self, task: ShotsTask, subject: Subject) -> None:
        self._subject = subject
        if not task.data:
            raise ClearheadError("shots needs texts: give a .jsonl(.gz) file, --shots.data FILE")
        fields = Task(name=task.data, text=task.text_field, label=task.label_field)
        rows = labelled_rows(task.data, fields, "--shots.")
        classes = labelled.classes_of(rows, fields)

        def examples(rows: Sequence[labelled.Row]) -> list[Example]:
            texts = [" ".join(row.text.split()) for row in rows]
            numbers = map(int, labelled.labels_of(rows, classes, fields))
            return list(map(Example, texts, numbers))

        shown = examples(rows)
        queries = examples(labelled_rows(task.test, fields, "--shots.")) if task.test else shown
        if len(queries) < task.queries:
            found = f"{task.test or task.data!r} has {len(queries)} rows"
            raise ClearheadError(f"queries is {task.queries}, and {found}: ask for fewer")
        self.labels = tuple(" ".join(name.split()) for name in classes)
        draws = SeededChoices(f"shots {subject.seed} queries")
        self.queries = tuple(draws.sample(queries, task.queries))
        texts = {query.text for query in self.queries}
        self.pool = tuple(example for example in shown if example.text not in texts)
        self.digest = digest_of([self.labels, self.pool, self.queries])[:8]
        _, self._gap = subject.ids("label: x", "\n")
        if not self._gap:
            raise ClearheadError("no token ends a line, and so a label: choose another tokenizer")
        spelt = [subject.ids("label:", f" {name}")[1] if name else () for name in self.labels]
        for name, ids in zip(self.labels, spelt, strict=True):
            if not ids or spelt.count(ids) > 1:
                raise ClearheadError(f"label {name!r} has no tokens of its own: rename it")
        self.answers: list[Ids] = [(*ids, *self._gap) for ids in spelt]
        self.questions = [self._question(query.text) for query in self.queries]

    def shown(self, length: int, word: str) -> list[Example]:
        """As many demonstrations as `word` says in digits, or "fill", that fit the length with the
        longest query and label; a shorter length's are among a longer one's."""
        if word != FILL and not (word.isdecimal() and int(word)):
            raise ClearheadError(f"counts: {word!r} is no whole number above 0, nor {FILL}")
        count = len(self.pool) if word == FILL else int(word)
        rest = max(map(len, self.questions)) + max(map(len, self.answers))
        room = length - rest - len(self._subject.begin)
        draws = SeededChoices(f"shots {self._subject.seed} demonstrations")
        left, shown, taken = list(self.pool), list[Example](), 0
        while left and len(shown) < count:
            place = draws.below(len(left))
            left[place], left[-1] = left[-1], left[place]
            taken += len(self._demonstration(left[-1]))
            if taken > room:
                break
            shown.append(left.pop())
        if not (shown and left if word == FILL else len(shown) == count):
            fit = f"{len(shown)} of {len(self.pool)} examples fit the {max(0, room):,} tokens"
            raise ClearheadError(f"shots: {word} asked for, and {fit} left of length {length:,}")
        return shown

    def context(self, shown: Sequence[Example]) -> Ids:
        """Everything before the query."""
        return (*self._subject.begin, *chain.from_iterable(map(self._demonstration, shown)))

    def right_answers(self, context: Ids) -> list[bool]:
        """For each query, whether its own label is the likeliest (the first of equal ones)."""
        right = []
        for query, question in zip(self.queries, self.questions, strict=True):
            prompts = [Prompt(context, question, answer) for answer in self.answers]
            losses = [fsum(one.loss) for one in self._subject.reader.ask(prompts)]
            right.append(losses.index(min(losses)) == query.label)
        return right

    def _question(self, text: str) -> Ids:
        return self._subject.ids("label: x\n", f"text: {text}\nlabel:")[1]

    def _demonstration(self, example: Example) -> Ids:
        return (*self._question(example.text), *self.answers[example.label], *self._gap)
