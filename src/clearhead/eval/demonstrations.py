"""Labelled texts as demonstrations in a prompt: their choice and order, and the labels' tokens.

A demonstration is "text: …", "label: …" and an empty line. It is tokenised in three pieces (up to
"label:", the label, the end of line), so that a label has the same tokens in every demonstration
and as an answer, and a prompt's length does not depend on the order.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clearhead.data import labelled
from clearhead.data.corpus import fingerprint_of
from clearhead.data.seeded_choices import SeededChoices
from clearhead.data.tasks import Task
from clearhead.errors import ClearheadError
from clearhead.eval.task import labelled_rows

Tokens = tuple[int, ...]


class Example(NamedTuple):
    """A text on one line, and the number of its label."""

    text: str
    label: int


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples drawn for prompts: the labels' names, in their order; the pool from which
    demonstrations are drawn, with no text of a query in it; and the queries."""

    labels: tuple[str, ...]
    pool: tuple[Example, ...]
    queries: tuple[Example, ...]

    @cached_property
    def digest(self) -> str:
        """A hex hash of all of it."""
        return fingerprint_of(self.labels, self.pool, self.queries)[:8]


def load_examples(
    data: str, test: str, *, text_field: str, label_field: str, queries: int, draws: SeededChoices
) -> Examples:
    """Draw the queries from `test`, or where that is empty from `data`; the pool is what is left.

    White space in texts and labels becomes single spaces. Labels are those of `data`.

    Raises:
        ClearheadError: no file, a file that cannot be read, a row that lacks a field, a label of
            `test` that `data` lacks, or fewer rows than queries.
    """
    if not data:
        raise ClearheadError(
            "shots needs labelled texts to show: give a .jsonl(.gz) file, --shots.data FILE"
        )
    task = Task(name=data, text=text_field, label=label_field)
    rows = labelled_rows(data, task, "--shots.")
    classes = labelled.classes_of(rows, task)
    shown = _examples(rows, classes, task)
    asked = _examples(labelled_rows(test, task, "--shots."), classes, task) if test else shown
    if len(asked) < queries:
        raise ClearheadError(
            f"queries is {queries}, and {test or data!r} has {len(asked)} rows: ask for at most "
            "those"
        )
    chosen = draws.sample(asked, queries)
    texts = {query.text for query in chosen}
    return Examples(
        labels=tuple(" ".join(name.split()) for name in classes),
        pool=tuple(example for example in shown if example.text not in texts),
        queries=tuple(chosen),
    )


def _examples(rows: Sequence[labelled.Row], classes: Sequence[str], task: Task) -> list[Example]:
    numbers = labelled.labels_of(rows, classes, task)
    return [
        Example(" ".join(row.text.split()), int(number))
        for row, number in zip(rows, numbers, strict=True)
    ]


class Wording:
    """The tokens of demonstrations, queries and labels.

    Attributes:
        answers: of each label, a space before and the end of line after it, so that one label's
            likelihood is no part of another's.

    Args:
        tokens: those of one text by its pieces. begin: the tokens that begin a prompt.

    Raises:
        ClearheadError: labels that tokenise to nothing, or to the same tokens.
    """

    def __init__(
        self, tokens: Callable[..., list[Tokens]], begin: Tokens, labels: Sequence[str]
    ) -> None:
        self._tokens, self.begin = tokens, begin
        _, self._gap = tokens("label: x", "\n")
        if not self._gap:
            raise ClearheadError(
                "the tokenizer gives the end of a line no token, and nothing else ends a label"
            )
        spelt = [tokens("label:", f" {name}")[1] if name else () for name in labels]
        for name, ids in zip(labels, spelt, strict=True):
            if not ids:
                raise ClearheadError(f"label {name!r} tokenises to nothing: give it a name")
        ids, count = Counter(spelt).most_common(1)[0]
        if count > 1:
            one, other, *_ = (n for n, same in zip(labels, spelt, strict=True) if same == ids)
            raise ClearheadError(f"labels {one!r} and {other!r} are the same tokens: rename one")
        self.answers: tuple[Tokens, ...] = tuple((*ids, *self._gap) for ids in spelt)

    def question(self, text: str) -> Tokens:
        """Up to where the label follows."""
        return self._tokens("label: x\n", f"text: {text}\nlabel:")[1]

    def demonstration(self, example: Example) -> Tokens:
        """A text with its label."""
        return (*self.question(example.text), *self.answers[example.label], *self._gap)


def fill(
    pool: Sequence[Example], wording: Wording, *, room: int, count: int | None, draws: SeededChoices
) -> list[Example]:
    """The first of the pool in a drawn order: `count` of them, or as many as take `room` tokens.

    Raises:
        ClearheadError: where not so many fit, or there are not so many.
    """
    if (count or 1) > len(pool):
        raise ClearheadError(
            f"shots: {count or 1} asked for, and {len(pool)} examples are left beside the "
            "queries: give more examples, or ask for fewer of either"
        )
    left, found, taken = list(pool), list[Example](), 0
    while left and (count is None or len(found) < count):
        place = draws.below(len(left))
        left[place], left[-1] = left[-1], left[place]
        taken += len(wording.demonstration(left[-1]))
        if taken > room:
            break
        found.append(left.pop())
    if count is None and not left:
        raise ClearheadError(
            f"all {len(pool)} examples take {taken:,} of the {room:,} tokens there are for them: "
            "give shorter lengths, more examples, or numbers of shots"
        )
    if len(found) < (count or 1):
        raise ClearheadError(
            f"shots: {count or 1} take more than the {max(0, room):,} tokens that query and label "
            "leave of the length: give longer lengths, or fewer shots"
        )
    return found


def at_random(shown: Sequence[Example], draws: SeededChoices) -> list[Example]:
    """In a drawn order."""
    return draws.sample(shown, len(shown))


def alternating(shown: Sequence[Example], draws: SeededChoices) -> list[Example]:
    """Labels in rotation, in a drawn order of labels, and of examples within each label.

    A label that has no more examples leaves the rotation.
    """
    by_label: dict[int, list[Example]] = {}
    for example in draws.sample(shown, len(shown)):
        by_label.setdefault(example.label, []).append(example)
    turns = draws.sample(list(by_label.values()), len(by_label))
    longest = max(map(len, turns))
    return [mine[turn] for turn in range(longest) for mine in turns if turn < len(mine)]


ORDERS: Mapping[str, Callable[[Sequence[Example], SeededChoices], list[Example]]] = {
    "random": at_random,
    "alternating": alternating,
}
