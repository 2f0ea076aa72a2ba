"""The command line in forks of one process that has imported everything: a case costs no start.

As a program it reads a JSON request a line, and answers with the fork's exit status.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


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
        # What generate writes, and commands to be run, are unchanged where no terminal is.
        unchanged = self.words[0] == "generate" or "--dry-run" in self.words
        shown = self.err if unchanged else self.out + self.err
        assert "\x1b" not in shown, f"a raw escape: {self.line!r}"
        if self.code == 2:
            last = (self.err.strip().splitlines() or [""])[-1]
            assert last.startswith("clearhead: "), f"not one line: {self.line}"


class Server:
    """Starts the program below, and asks it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, *words: str, cwd: Path | None = None, kill_at: int = 0, seconds: int = 120
    ) -> Done:
        """Run a command line; with `kill_at` up to that file operation under `cwd`."""
        cwd = cwd or self._folder
        request = {"words": words, "cwd": str(cwd), "log": str(self._folder / "log")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({**request, "kill_at": kill_at, "seconds": seconds}),
            file=self._process.stdin,
            flush=True,
        )
        code = int(self._process.stdout.readline())
        out, err = (
            (self._folder / f"log.{name}").read_text("utf-8", "replace") for name in ("out", "err")
        )
        return Done(list(words), code, out, err)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def _kill_at(count: int, folder: str) -> None:
    """Die at the `count`-th file operation under a folder, as if the machine had."""
    left = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(arguments[0]).startswith(folder):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _child(request: dict[str, Any]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        log = os.open(f"{request['log']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, number)
    os.chdir(request["cwd"])
    sys.argv = ["clearhead", *request["words"]]
    signal.alarm(request["seconds"])
    if request["kill_at"]:
        _kill_at(request["kill_at"], request["cwd"])
    from clearhead.cli import main

    code = 0
    try:
        main(request["words"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Fork for each request."""
    import importlib
    import pkgutil

    import plotly.graph_objects  # noqa: F401 (what a child would import by itself, each anew)
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import clearhead

    for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."):
        with contextlib.suppress(ImportError):  # of extras, and of what only a GPU needs
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
