"""Timing of several sides that take turns in one process, for a shared machine."""

import time
from collections.abc import Callable, Mapping

import torch


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
