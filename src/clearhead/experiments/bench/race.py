"""Two sides taking turns in one process; the quotient of their medians."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
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


def take_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, *, unmeasured: int = 2
) -> dict[str, list[float]]:
    """Seconds of each side in each round, after unmeasured calls (the first one compiles)."""
    for step in sides.values():
        for _ in range(unmeasured):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            started = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return seconds


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
