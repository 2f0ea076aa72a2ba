"""Two processes give the update of one: DDP, FSDP2."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("processes.py")
KINDS = ("haar", "hadamard")


@pytest.fixture(scope="module")
def differences():
    """What each process says it is off by, for each thing it tried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            lines = [line.split("\t") for line in output.splitlines() if "\t" in line]
            found.append({what: float(value) for what, value in lines})
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize(
    "what",
    [
        *(f"{way} {kind}" for way in ("ddp", "fsdp") for kind in KINDS),
        "fsdp by size",
        "sharded columns",
        "fsdp resumed",
        "nan",
    ],
)
def test_two_processes_are_one(differences, what):
    for process in differences:
        assert process[what] < 2e-6
