"""All comparisons of one page, so that each can be judged among them."""

from dataclasses import dataclass
from functools import cached_property

from clearhead.report import verdicts
from clearhead.report.evaluation_values import summaries, tasks
from clearhead.report.evaluations import Grid
from clearhead.report.milestones import at_equal_loss
from clearhead.report.records import Records
from clearhead.report.statistics import Difference
from clearhead.report.tables import Table, comparison


@dataclass(frozen=True, kw_only=True)
class Contrasts:
    """The tables of a page: by label the arms, and the arms at equal loss; by label and task the
    evaluations."""

    arms: dict[str, Table]
    equal_loss: dict[str, Table]
    evaluations: dict[tuple[str, str], list[Grid]]

    @cached_property
    def differences(self) -> list[Difference]:
        """Every difference that any of the tables shows."""
        found = [
            one
            for tables in (self.arms, self.equal_loss)
            for table in tables.values()
            for one in table.differences()
        ]
        for grids in self.evaluations.values():
            found.extend(one for grid in grids for one in grid.differences.values())
        return found

    @cached_property
    def threshold(self) -> float:
        """The largest p of a difference that holds among all of the page."""
        return verdicts.threshold_of(self.differences)

    @cached_property
    def account(self) -> str:
        """How many comparisons there are and hold, in words."""
        return verdicts.account(self.differences)


def compare_all(records: Records) -> Contrasts:
    """Compare the arms of every label."""
    sets = {label: records.labelled(label) for label in records.labels()}
    equal = {label: at_equal_loss(labelled) for label, labelled in sets.items()}
    return Contrasts(
        arms={
            label: table
            for label, labelled in sets.items()
            if (table := comparison(labelled)).columns
        },
        equal_loss={label: table for label, table in equal.items() if table is not None},
        evaluations={
            (label, task): summaries(labelled, task)
            for label, labelled in sets.items()
            for task in tasks(labelled)
        },
    )
