"""New processes without the seconds of their imports: forks of one that has imported libraries.

A fork has imported nothing of clearhead. As a program this reads a JSON request a line: what to
start, answered by the fork's number, or which to wait for, answered by its exit status.
"""

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("pandas", "scipy.optimize", "scipy.stats", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.distributed.checkpoint.state_dict", "safetensors.torch"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.dynamic_module_utils"),
    *("transformers.models.llama.modeling_llama", "plotly.graph_objects", "tyro"),
)


@dataclass(frozen=True)
class Started:
    """A fork, and the file of what it writes, less the name of the stream."""

    server: "Warm"
    pid: int
    log: Path

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Its exit status (minus the number of a signal) and what it wrote."""
        code = self.server.ask({"wait": self.pid})
        out, err = (Path(f"{self.log}.{name}").read_text("utf-8", "replace") for name in STREAMS)
        return subprocess.CompletedProcess([], code, out, err)


STREAMS = ("out", "err")
# Variables of the environment that libraries read once, and the modules that keep them.
READ_AT_IMPORT = {
    "HF_MODULES_CACHE": "transformers.dynamic_module_utils",
    "HF_HUB_CACHE": "huggingface_hub.constants",
}


class Warm:
    """Starts the program below, which also imports all modules of `packages`, and asks it.

    What the forks write is in files of the folder.
    """

    def __init__(self, folder: Path, *packages: str) -> None:
        self._folder, self._packages, self._count = folder, packages, 0
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any]) -> int:
        """The answer to a request."""
        if self._process is None:
            words = [sys.executable, __file__, *self._packages]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            alone = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(words, text=True, env=alone, **pipes)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        seconds: int = 400,
        **more: object,
    ) -> Started:
        """Start Python with these words: -c CODE, -m MODULE or a file, and arguments.

        SIGALRM ends it after so many seconds; after `kill_at` file operations under `cwd` it is
        killed.
        """
        self._count += 1
        log = self._folder / f"{self._count}"
        request = {"words": [*map(str, words)], "cwd": str(cwd or self._folder), "log": str(log)}
        environment = dict(os.environ if env is None else env)
        pid = self.ask({**request, "env": environment, "seconds": seconds, **more})
        return Started(self, pid, log)

    def run(self, *words: object, **how: Any) -> "subprocess.CompletedProcess[str]":
        """Start it, and wait for its end."""
        return self.start(*words, **how).wait()

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=20)


def _execute(words: list[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, ""
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _kill_at(count: int, folder: str) -> None:
    """Die at the `count`-th file operation under a folder, as if the machine had."""
    names = ("rename", "mkdir", "remove", "rmdir", "truncate")
    events = {"open", "shutil.rmtree", *(f"os.{name}" for name in names)}
    left = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in events or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(arguments[0]).startswith(folder):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _child(request: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in enumerate(STREAMS, 1):
        log = os.open(f"{request['log']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    for name, module in READ_AT_IMPORT.items():
        if name in os.environ:
            setattr(sys.modules[module], name, os.environ[name])
    signal.alarm(request["seconds"])
    if request.get("kill_at"):
        _kill_at(request["kill_at"], request["cwd"])
    code = 0
    try:
        _execute(request["words"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Fork for each request."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for package in sys.argv[1:]:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        ):
            with contextlib.suppress(ImportError):  # of extras, and of what only a GPU needs
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
    sys.modules["torch"].set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif not (answer := os.fork()):
            _child(request)
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
