"""Progress of long work in one line: "run 3 of 8, 12 min left"."""

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO

from clearhead.terminal import printable

PLAIN_LINES = 20  # about so many for the whole work, so that a log stays readable
_EARLY = 0.05  # of a unit: before so much is done, its pace says little


class Work(AbstractContextManager["Work"]):
    """Long work as a number of units, and the time that the rest will take.

    `start`, then for each unit `begin`, `update` and `end`, or `skip` for one that is done already.
    Work inside other work reports to the same object: the first `start` counts.

    Args:
        stream: where progress is shown: one overwritten line on a terminal, plain lines in a file.
        say: function that receives notes where there is no stream.
    """

    def __init__(
        self,
        unit: str = "run",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._unit, self._stream, self._clock, self._say = unit, stream, clock, say
        self._total: int | None = None
        self._done = 0
        self._share = 0.0  # of the unit at hand
        self._before = 0.0  # units that were done before this process began
        self._started = self._printed = 0.0

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, total: int) -> None:
        """Set the number of units, at the first call."""
        if self._total is None:
            self._total, self._started = total, self._clock()

    def extend(self, more: int) -> None:
        """Add units that turned out to be needed."""
        self._total = (self._total or 0) + more

    def skip(self) -> None:
        """Count a unit that is done already."""
        self._done += 1
        self._before += 1

    def begin(self, name: str) -> None:
        """Begin the next unit."""
        if self.place:
            self._show(f"{self.place}: {name}", True)

    def resume(self, share: float) -> None:
        """Count a share of the current unit that is done already."""
        self._share = share
        self._before += share
        self._printed = self.share

    def update(self, share: float, detail: str = "") -> None:
        """Show the share of the current unit that is done, from 0 to 1, and a detail."""
        self._share = share
        due = round((self.share - self._printed) * PLAIN_LINES, 6) >= 1
        line = "  ".join(filter(None, (self.place, detail)))
        self._show(line, due or (share == 1 and self._total == 1))

    def end(self) -> None:
        """End a unit."""
        self._done += 1
        self._share = 0.0

    def say(self, line: str) -> None:
        """Print a line beside the progress, or pass it to `say`."""
        self.close()
        if self._stream is None:
            self._say(line)
        else:
            print(printable(line), file=self._stream, flush=True)

    def close(self) -> None:
        """Clear the terminal's line."""
        self._show("", False)

    def _show(self, line: str, due: bool) -> None:
        if self._stream is None:
            return
        if self._stream.isatty():
            short = printable(line)[: shutil.get_terminal_size().columns - 1]
            with suppress(OSError):  # of a terminal that is gone: the work goes on
                print(f"\r\x1b[K{short}", end="", file=self._stream, flush=True)
        elif due:
            self._printed = self.share
            self.say(line)

    @property
    def share(self) -> float:
        """The share of all units that is done, from 0 to 1."""
        return min(1.0, (self._done + self._share) / self._total) if self._total else 0.0

    @property
    def place(self) -> str:
        """ "run 3 of 8, 12 min left"; "" for a single unit, no time before a pace is known."""
        if self._total is None or self._total == 1:
            return ""
        where = f"{self._unit} {min(self._done + 1, self._total)} of {self._total}"
        worked = self._done + self._share - self._before
        if worked < _EARLY:
            return where
        rest = max(0.0, self._total - self._done - self._share)
        return f"{where}, {in_words(rest * (self._clock() - self._started) / worked)} left"


class Line(Work):
    """Work shown on a stream, standard error by default."""

    def __init__(self, stream: TextIO | None = None, **options: Any) -> None:
        super().__init__(stream=sys.stderr if stream is None else stream, **options)


def in_words(seconds: float) -> str:
    """45 s, 12 min, 3.4 h or 5.6 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds >= 72 * 3600:
        return f"{seconds / 86_400:,.1f} days"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
