"""The book: what is undecided, and what each repair costs and buys."""

import pytest

from clearhead.papers import book
from clearhead.papers.claims import judged, threshold_over
from clearhead.papers.contrasts import Judgement
from clearhead.papers.requests import cost
from clearhead.papers.study import Study

from .test_claims import _records


def test_what_is_undecided_has_the_command_for_small_and_its_cost():
    """The cost is that of --list; what is decided, and what is counted, has none."""
    losses = {"transformer": [2.5, 2.6, 2.4], "sas": [2.4, 2.62, 2.5]}
    lines = [*book.markdown({"r": _records(losses)})]
    (line,) = (line for line in lines if "--scale small" in line)
    assert "### sas/figure5: undecided" in lines
    asked = "At `small`: `clearhead reproduce sas/figure5 --scale small`, 36 runs, 173 M tokens, "
    assert asked in line
    assert "of training on one GPU" in line


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


def test_the_table_has_the_numbers_of_the_claims():
    losses = {"transformer": [2.5, 2.51, 2.49], "sas-p": [2.4, 2.41, 2.39]}
    sources = {"r": _records(losses)}
    lines = [*book.markdown(sources)]
    (line,) = (one for one in lines if one.startswith("| SAS-P | the block |"))
    gain = "loss, 6 layers: −0.100 (−0.123 to −0.077)"
    assert line.endswith(
        f"| change in tokens a second: no record | {gain} | r, 6 layers: 3 seeds "
        "| gains; its price is open |"
    )
    rows = judged(sources)
    assert 0 < threshold_over(ones for _, ones, _ in rows) < 0.05
    table = "\n".join(lines).partition("\n\nOf ")[0].splitlines()[4:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table] == [
        one[0] for one in book.REPAIRS
    ]
