import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="session")
def tiny():
    """The module beside this file."""
    spec = importlib.util.spec_from_file_location("tests_train_tiny", TINY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trainer():
    """trainer(output, config, **how) trains in a process of its own: (exit status, its output)."""
    server = subprocess.Popen(
        [sys.executable, str(TINY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(output, config=None, *, resume=False, **how):
        log = output.with_name(output.name + ".log")
        request = {"output": str(output), "log": str(log), "config": config or {}, **how}
        server.stdin.write(json.dumps({**request, "resume": resume}) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), log.read_text()

    yield ask
    server.stdin.close()
    server.wait(timeout=20)
