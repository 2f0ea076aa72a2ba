"""Results in one file that only grows: a measurement that was stopped goes on from it."""

import json
from collections.abc import Iterable
from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.records import jsonl
from clearhead.records.loading import Reader, goes_on, records_of, trusted
from clearhead.records.runs import COMPARISON, Line, Records


class Store:
    """Records of one study in a file, to which each result is appended in one write.

    A result is the rows of one cell of a run and the line of kind "cell" that closes them. Without
    that line, as a kill leaves it, the rows do not count. Another process must not append.

    Args:
        path: of the file, which is made with the first result; None keeps results in memory.
        study: of its runs.

    Raises:
        ClearheadError: naming file and line, for what is no record; for records of another study.
    """

    def __init__(self, path: Path | None, study: str = COMPARISON) -> None:
        self.path = path
        self._reader = Reader()
        if path is not None and path.exists():
            jsonl.each([path], self._reader.add)
        with trusted(*([path] if path else [])):
            if others := {run.study for run in self._reader.runs()} - {study}:
                raise ClearheadError(
                    f"{path} holds records of another study ({others.pop()}): name another"
                )
            self._rows = {
                (run, cell): lines
                for run in self._reader.headers
                for cell, lines in self._reader.cells(run).items()
            }
        self._begun = set[str]()

    def has(self, cell: str, header: Line) -> bool:
        """True if the result of a cell is there, and counts beside others of the run's `header`."""
        run = header["run"]
        if (run, cell) not in self._rows:
            return False
        with trusted(*([self.path] if self.path else [])):
            return goes_on(header, self._reader.headers[run])

    def rows(self, cell: str, header: Line) -> list[Line]:
        """The rows of a result and its closing line, as they are read from the file."""
        return self._rows[header["run"], cell]

    def add(self, cell: str, header: Line, rows: Iterable[Line], **closing: object) -> list[Line]:
        """Append a result; return its `rows` with the closing line.

        Args:
            cell: identifies the result within its run.
            header: line of the run, "run" its name; written before the first result that is added.
            rows: payloads of records; each gets the names of its run and cell.
            closing: facts of the closing line: "task", "at" and how the result was made.

        Raises:
            ClearheadError: where the file cannot be written; it goes on once there is room.
        """
        run = header["run"]
        name = {"run": run, "cell": cell}
        lines = [{"kind": "measure", **line, **name} for line in rows]
        lines.append({"kind": "cell", **name, "task": "", "at": {}, "lines": len(lines), **closing})
        if run not in self._begun:
            lines.insert(0, {"kind": "run", **header})
            self._begun.add(run)
        lines = [json.loads(jsonl.encode(line)) for line in lines]
        for line in lines:
            self._reader.add(line)
        if self.path is not None:
            jsonl.append(self.path, *lines)
        self._rows[run, cell] = [line for line in lines if line["kind"] != "run"]
        return self._rows[run, cell]

    def records(self) -> Records:
        """All that counts."""
        return records_of(self._reader.runs())
