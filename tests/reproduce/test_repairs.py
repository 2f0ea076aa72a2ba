"""The table that says of each repair what it costs and buys."""

import pytest

from clearhead.reproduce import book
from clearhead.reproduce.claims import judged, threshold_over
from clearhead.reproduce.contrasts import Judgement

from .test_claims import _records


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
