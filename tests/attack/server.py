"""The command line in forks of one process that has imported everything: a case costs no start."""

import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from tests_warm import Warm


@dataclass(frozen=True)
class Done:
    """A command that ended: its exit status (minus the number of a signal), and what it said."""

    words: list[str]
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its command line, and what came of it."""
        return (
            f"clearhead {shlex.join(self.words)}\nexit {self.code}\n{self.out[-800:]}\n{self.err}"
        )

    def check(self) -> None:
        """Done, or refused in one line: nothing else."""
        assert self.code != -signal.SIGALRM, f"still running: {self.line}"
        assert self.code in (0, 2), f"exit status: {self.line}"
        assert "Traceback" not in self.err, f"traceback: {self.line}"
        # What generate writes is unchanged where no terminal is.
        shown = self.err if self.words[0] == "generate" else self.out + self.err
        assert "\x1b" not in shown, f"a raw escape: {self.line!r}"
        if self.code == 2:
            last = (self.err.strip().splitlines() or [""])[-1]
            assert last.startswith("clearhead: "), f"not one line: {self.line}"


class Server:
    """Runs command lines."""

    def __init__(self, folder: Path) -> None:
        self._warm = Warm(folder, "clearhead")
        self.close = self._warm.close

    def run(
        self, *words: str, cwd: Path | None = None, kill_at: int = 0, seconds: int = 120
    ) -> Done:
        """Run a command line; with `kill_at` up to that file operation under `cwd`."""
        how = {"cwd": cwd, "kill_at": kill_at, "seconds": seconds}
        done = self._warm.run("-m", "clearhead", *words, **how)
        return Done(list(words), done.returncode, done.stdout, done.stderr)
