"""CPU time of every verb's help."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.race import Ratio
from clearhead.cli import VERBS


def start(rounds: int) -> Iterator[Ratio]:
    """CPU seconds of `clearhead VERB --help`, the least of all rounds, against one second."""
    for verb in VERBS:
        seconds = [_cpu_seconds(verb) for _ in range(rounds)]
        yield Ratio(
            name="start",
            ours=f"{verb} --help, CPU seconds",
            peer="1 s",
            ratio=min(seconds),
            bound=1.0,
            seconds={verb: seconds},
        )


def _cpu_seconds(verb: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "clearhead", verb, "--help"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
