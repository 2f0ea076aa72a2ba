"""Two processes give the update of one: DDP, FSDP2."""

import socket
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("processes.py")
KINDS = ("haar", "hadamard")


@pytest.fixture(scope="module")
def differences(warm):
    """What each process says it is off by, for each thing it tried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    found = []
    for done in [each.wait() for each in [warm.start(PROGRAM, rank, port) for rank in range(2)]]:
        assert done.returncode == 0, done.stderr
        lines = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
        found.append({what: float(value) for what, value in lines})
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
