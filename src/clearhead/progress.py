"""The place of long work in one line: "run 3 of 8, 12 min left"."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from clearhead.terminal import console, printable

PLAIN_LINES = 20  # about so many for the whole work, so that a log stays readable
_EARLY = 0.05  # of a unit: before so much is done, its pace says little


class Work:
    """Long work as a number of units, and the time that the rest will take. Shows nothing.

    `start`, then for each unit `begin`, `update` and `end`, or `skip` for one that is done already.
    Work inside other work reports to the same object: the first `start` counts.
    """

    def __init__(
        self,
        unit: str = "run",
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._unit, self._clock, self._say = unit, clock, say
        self._total: int | None = None
        self._done = 0
        self._share = 0.0  # of the unit at hand
        self._before = 0.0  # units that were done before this process began
        self._started = 0.0
        self.name = ""

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, total: int) -> None:
        """Say how many units there are; without effect where that was said before."""
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
        self.name, self._share = name, 0.0

    def resume(self, share: float) -> None:
        """Count a part of the unit at hand that is done already."""
        self._share = share
        self._before += share

    def update(self, share: float, detail: str = "") -> None:
        """Say how far the unit at hand is, from 0 to 1, and its numbers."""
        self._share = share

    def end(self) -> None:
        """End a unit."""
        self._done += 1
        self._share = 0.0

    def say(self, line: str) -> None:
        """Tell a line beside, where there is someone to tell."""
        if self._say is not None:
            self._say(line)

    def close(self) -> None:
        """Give the terminal back."""

    @property
    def share(self) -> float:
        """The part of all units that is done."""
        return min(1.0, (self._done + self._share) / self._total) if self._total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The time that the rest takes at the pace until now; None before there is a pace."""
        worked = self._done + self._share - self._before
        if self._total is None or worked < _EARLY:
            return None
        rest = max(0.0, self._total - self._done - self._share)
        return rest * (self._clock() - self._started) / worked

    @property
    def place(self) -> str:
        """ "run 3 of 8, 12 min left"; nothing where there is one unit."""
        if self._total is None or self._total == 1:
            return ""
        left = self.seconds_left
        where = f"{self._unit} {min(self._done + 1, self._total)} of {self._total}"
        return where if left is None else f"{where}, {in_words(left)} left"


class Line(Work):
    """Work shown on `stream`: a live bar on a terminal, plain lines elsewhere."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        unit: str = "run",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(unit, clock=clock)
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._printed = 0.0

    def start(self, total: int) -> None:
        super().start(total)
        if self._stream.isatty() and self._bar is None:
            self._draw()

    def begin(self, name: str) -> None:
        super().begin(name)
        if self._bar is None and self.place:
            self._printed = self.share
            self.say(f"{self.place}: {name}")
        self._show("")

    def resume(self, share: float) -> None:
        super().resume(share)
        self._printed = self.share

    def update(self, share: float, detail: str = "") -> None:
        super().update(share, detail)
        self._show(detail)
        due = round((self.share - self._printed) * PLAIN_LINES, 6) >= 1
        if self._bar is None and (due or (share == 1 and self._total == 1)):
            self._printed = self.share
            self.say("  ".join(filter(None, (self.place, detail))))

    def end(self) -> None:
        super().end()
        self._show("")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(printable(line), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console(file=self._stream),
        )
        self._task = self._bar.add_task(self.place, total=1.0, detail="")
        self._bar.start()

    def _show(self, detail: str) -> None:
        if self._bar is not None:
            named = ": ".join(filter(None, (self.place, self.name)))
            self._bar.update(self._task, description=named, completed=self.share, detail=detail)


def in_words(seconds: float) -> str:
    """45 s, 12 min or 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
