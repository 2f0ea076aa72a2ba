"""The newcomer's first command, against what it was promised to take."""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.race import Ratio


def demo(rounds: int) -> Iterator[Ratio]:
    """`make demo`'s job, once, after installation: against five minutes and four GiB."""
    clearhead = shutil.which("clearhead", path=str(Path(sys.executable).parent)) or "clearhead"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [clearhead, "demo", "--output", folder], check=True, stdout=subprocess.DEVNULL
        )
        took = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    for ours, peer, ratio in (
        ("demo, seconds", "300 s", took / 300),
        ("demo, bytes at the peak", "4 GiB", peak / 2**32),
    ):
        yield Ratio(
            name="demo", ours=ours, peer=peer, ratio=ratio, bound=1.0, seconds={"demo": [took]}
        )
