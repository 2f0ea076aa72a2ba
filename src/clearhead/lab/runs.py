"""Training and measurement of the missing runs, one after the other.

OUTPUT/RUN/             a run's folder (`clearhead.train.run_dir`); its model is in RUN/final
OUTPUT/records.jsonl    the records, to which each run is appended as soon as it is measured
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clearhead.lab.configs import RECORDS
from clearhead.progress import Work
from clearhead.records.loading import Store
from clearhead.records.runs import Line, Records
from clearhead.terminal import say
from clearhead.train.run_dir import holds_run, is_finished


class Trial:
    """A configuration with a seed."""

    called: str
    folder: Path
    header: Line  # the run's line in the records, to which `rows` may add
    cell: str  # identifies the result among those of the run

    def check(self, known: Mapping[str, Line]) -> None:
        """Refuse what would fail only hours later, and settings that differ from those of the runs
        in `known`, the lines of the records by name of run."""

    def rows(self, work: Work) -> Iterable[Line]:
        """Train the model, or go on where it stopped, and measure it."""
        raise NotImplementedError


def run_missing(trials: Sequence[Trial], output: Path, task: str, work: Work) -> Records:
    """Train and measure the trials that `output` lacks, a locked folder; return its records."""
    store = Store(output / RECORDS)
    for one in trials:  # all before the first is trained, which may take hours
        one.check(store.headers)
    work.start(len(trials))
    for one in trials:
        diverged = store.headers.get(one.header["run"], {}).get("diverged")
        there = holds_run(one.folder) if diverged else is_finished(one.folder)
        if there and store.has(one.cell, one.header):
            work.skip()
            say(f"{one.called}: already done")
            continue
        rows = [*one.rows(work)]
        store.add(one.cell, one.header, rows, task=task)
        work.end()
    return store.records()
