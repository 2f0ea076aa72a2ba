"""The peak memory of one run, not of everything the process did before."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peak memory since construction.

    On CUDA: the most bytes that PyTorch's allocator held on that device. Elsewhere: the process's
    peak resident size. Linux lets a process reset that peak; where it cannot be reset, it counts
    from the start of the process.
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
        with suppress(OSError):  # Linux alone has it
            status = _STATUS.read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
