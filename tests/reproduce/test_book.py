"""The book: what is undecided, and true of each record that it joins."""

from clearhead.reproduce import book
from clearhead.reproduce.requests import cost
from clearhead.reproduce.study import Study

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
