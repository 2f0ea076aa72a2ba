"""The peak memory of one run, not of everything the process did before."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """Peak memory since construction: on CUDA what PyTorch's allocator held on that device;
    elsewhere the resident size, counted from the process's start where it cannot be reset."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak (man 5 proc)

    def bytes(self) -> int:
        """The peak so far, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with suppress(OSError):
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
