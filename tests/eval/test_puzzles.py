"""Evaluation of puzzles: by the words that a model writes."""

from dataclasses import replace

import pytest

from clearhead.data.retrieval import held_out
from clearhead.eval.answers import Answer
from clearhead.eval.puzzles import BrevoTask, DepoTask, ManoTask

from .conftest import numbers

TASKS = {
    "depo": DepoTask(vertices=5, hops=(1, 2), samples=4),
    "brevo": BrevoTask(vertices=(4, 5), samples=4),
    "mano": ManoTask(operations=(2, 3), samples=4),
}


class Oracle:
    """A reader that writes the answers, or other words."""

    def __init__(self, write):
        self.prompts, self._write = [], write

    def ask(self, prompts, answers, *, new_tokens, advanced):
        self.prompts = list(prompts)
        assert new_tokens == max(map(len, answers))
        return [
            Answer(written=self._write(one), loss=(0.5,) * len(one), right=(True,) * len(one))
            for one in answers
        ]


@pytest.mark.parametrize("name", TASKS)
def test_answers_count_by_their_words(name, subject) -> None:
    task = TASKS[name]
    after = subject.encoder.pieces(" and more")[0]
    for cell in task.cells(subject):
        for write, right in (
            (lambda answer: (*answer, *after), 1.0),  # what follows the stop does not matter
            (lambda answer: (*after, *answer), 0.0),
            (lambda answer: (), 0.0),
        ):
            oracle, copy = Oracle(write), replace(subject)
            copy.__dict__["reader"] = oracle
            found = numbers(task.measure(copy, cell, lambda steps: None))
            assert found["accuracy"] == right
            assert 0 < found["chance"] <= 0.5
        shown = [subject.tokenizer.decode(one.ids) for one in oracle.prompts]
        assert len(set(shown)) == task.samples


def test_puzzles_asked_are_held_out_and_drawn_by_seed(subject) -> None:
    task = TASKS["depo"]
    (cell, _) = task.cells(subject)
    shown = []
    for seed in (0, 1):
        oracle, copy = Oracle(lambda answer: answer), replace(subject, seed=seed)
        copy.__dict__["reader"] = oracle
        [*task.measure(copy, cell, lambda steps: None)]
        shown.append([subject.tokenizer.decode(one.context) for one in oracle.prompts])
    assert not set(shown[0]) & set(shown[1])
    for text in shown[0]:
        pairs = text.partition("Links:")[2].strip(" .").split(",")
        edges = sorted(">".join(pair.split()) for pair in pairs)
        assert held_out(" ".join(edges))


def test_a_model_is_read(subject) -> None:
    for task in TASKS.values():
        (cell, *_) = task.cells(subject)
        found = numbers(task.measure(subject, cell, lambda steps: None))
        assert 0 <= found["accuracy"] <= 1
        assert found["answer_loss"] > 0
