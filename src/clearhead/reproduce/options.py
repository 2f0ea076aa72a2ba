"""Options that change an experiment; no torch."""

from dataclasses import dataclass

from clearhead.experiments.configs import Base
from clearhead.metavars import Pattern, Source
from clearhead.ranges import Count, Natural


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes that a command makes to experiments."""

    seeds: tuple[Natural, ...] = ()
    """Seeds, in place of the experiment's own."""
    tokens: Count | None = None
    """Tokens of every training, in place of the experiment's own."""
    only: tuple[Pattern, ...] = ()
    """Arms to run, by name or pattern, such as "sas*"; by default all of the experiment."""
    questions: tuple[Pattern, ...] = ()
    """Measurements of each model, by name or pattern, such as banking77; by default all of the
    experiment. On a machine without network, leave out those that need the hub."""
    base: Base = None
    """The trained model to start from, a folder or a hub name, in place of the experiment's own."""
    data: tuple[Source, ...] = ()
    """Sources of the training text, in place of the experiment's own."""
    test_data: tuple[Source, ...] = ()
    """Sources of the evaluations' text, read whole, in place of the experiment's own text (or only
    of its text from the hub, if it has some); for abilities the documents to summarise."""
