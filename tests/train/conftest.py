import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from . import tiny as module


@pytest.fixture(scope="session")
def tiny():
    """The module beside this file."""
    return module


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Starts Python as a fork of a process that has imported what trains."""
    folder = tmp_path_factory.mktemp("train")
    with closing(sys.modules["tests_warm"].Warm(folder, "clearhead.train")) as server:
        yield server


@pytest.fixture(scope="session")
def trainer(warm):
    """trainer(output, config, **how) trains in a process of its own: (exit status, its output)."""

    def run(output, config=None, *, resume=False, **how):
        request = {"output": str(output), "config": config or {}, "resume": resume, **how}
        done = warm.run(Path(module.__file__), json.dumps(request))
        return done.returncode, done.stdout + done.stderr

    return run
