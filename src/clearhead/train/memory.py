"""Memory: the peak of one run, not of everything the process did before; room for a copy."""

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from clearhead.train.parallel import local

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_HOST = Path("/proc/meminfo")


class PeakMemory:
    """Measures from its construction on.

    On CUDA: the bytes that PyTorch's allocator held at most on that device. Elsewhere: the
    process's largest resident size. Linux lets a process reset that mark; where it cannot be
    reset, the mark since the process started is the best there is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            _CLEAR_REFS.write_text("5")  # 5: reset the peak resident size (man 5 proc)

    def bytes(self) -> int:
        """The peak so far, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = _bytes(_STATUS, "VmHWM:")
        if peak is not None:
            return peak
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def has_room_for(tensors: Iterable[torch.Tensor]) -> bool:
    """True if this process's part of the tensors fits into half of the host's free memory.

    Every process of a machine wants as much. Where free memory is not known there is room.
    """
    free = _bytes(_HOST, "MemAvailable:")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return free is None or 2 * processes * sum(local(t).nbytes for t in tensors) <= free


def _bytes(path: Path, name: str) -> int | None:
    """A line of what Linux says about memory; None on other systems."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
