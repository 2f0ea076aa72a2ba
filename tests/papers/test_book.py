"""The book: what an experiment costs, and what each repair is worth."""

import pytest

from clearhead.papers import book
from clearhead.papers.contrasts import Judgement
from clearhead.papers.requests import cost
from clearhead.papers.study import Study


def test_the_tokens_of_a_long_experiment_are_written_out():
    arms = [Study().changed(tokens=500_000_000).arm("transformer", 1e-3)] * 2
    assert cost(arms, "small").startswith("6 runs, 3,000 M tokens, ")


@pytest.mark.parametrize(
    ("costs", "buys", "word"),
    [
        ("HOLDS", "HOLDS", "worth it here"),
        ("DOES_NOT_HOLD", "HOLDS", "at a price"),
        ("UNTESTED", "HOLDS", "gains; its price is open"),
        ("HOLDS", "UNDECIDED", "not shown"),
        ("HOLDS", "UNTESTED", "not tested"),
        ("HOLDS", "DOES_NOT_HOLD", "no"),
    ],
)
def test_a_repair_is_worth_what_it_gains_at_its_price(costs, buys, word):
    assert book.worth(Judgement[costs], Judgement[buys]) == word
