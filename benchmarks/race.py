"""A benchmark's result: the quotient of two sides' medians, with the machine and the versions."""

import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from clearhead.versions import versions


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours against a peer: the faster path of each, and what was promised of the quotient, if
    anything was."""

    name: str
    ours: str
    peer: str
    ratio: float
    bound: float | None
    seconds: dict[str, list[float]]

    def record(self) -> dict[str, Any]:
        """One JSON line, with the machine and the versions."""
        device = "cpu"
        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        return {
            "kind": "bench",
            **vars(self),
            "device": f"{device}, {torch.get_num_threads()} CPU threads, {platform.machine()}",
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def faster_paths(
    name: str, ours: str, peer: str, bound: float | None, seconds: dict[str, list[float]]
) -> Ratio:
    """Ours against the peer, each by the faster of its sides named "NAME, path"."""
    medians = {side: statistics.median(times) for side, times in seconds.items()}

    def fastest(prefix: str) -> str:
        return min((s for s in medians if s.startswith(f"{prefix}, ")), key=medians.__getitem__)

    kept = {
        side: times
        for side, times in seconds.items()
        if side.startswith((f"{ours}, ", f"{peer}, "))
    }
    return ratio_of(name, fastest(ours), fastest(peer), bound, kept)


def ratio_of(
    name: str, ours: str, peer: str, bound: float | None, seconds: dict[str, list[float]]
) -> Ratio:
    """Ours against the peer, by the medians of their rounds."""
    ratio = statistics.median(seconds[ours]) / statistics.median(seconds[peer])
    return Ratio(name=name, ours=ours, peer=peer, ratio=ratio, bound=bound, seconds=seconds)


def in_new_process(function: str, *arguments: str, **environment: str) -> float:
    """A number that a function of the benchmarks, "module.function", returns in a new process."""
    module, _, name = function.rpartition(".")
    code = f"from benchmarks.{module} import {name}; print({name}{arguments!r})"
    paths = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    return float(ran.stdout)
