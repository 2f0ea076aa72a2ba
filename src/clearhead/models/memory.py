"""Checks that work on a model fits into memory, before the model is loaded."""

import math
import os
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from clearhead.errors import ClearheadError
from clearhead.models.loading import best_device, resolved

_GIB = 2**30


def available(device: torch.device) -> float:
    """Bytes that are free on a GPU, or on the CPU without swapping; infinite where the system does
    not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text("utf-8").splitlines()
        stated = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
        return int(stated[0]) * 1024 if stated else math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(wanted: float, what: str, device: torch.device) -> None:
    """Raise a ClearheadError where less than `wanted` bytes are available."""
    if wanted > (free := available(device)):
        raise ClearheadError(
            f"{what} wants {wanted / _GIB:.1f} GiB of memory, and {free / _GIB:.1f} GiB are "
            "available: use a larger machine, or end other programs"
        )


def require_room(name: str, work: str, *, copies: float, wide: bool = False) -> None:
    """Refuse to load a model for work whose copies of the weights would not fit into memory.

    Args:
        work: a verb for the message, such as "convert".
        copies: number of copies of all weights that exist at once.
        wide: whether they are in float32; otherwise in their saved dtype.
    """
    folder = Path(resolved(name))
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    total = 0
    for path in folder.glob("model*.safetensors"):  # Mistral's folders hold the weights twice
        if not wide:
            total += path.stat().st_size
            continue
        with suppress(SafetensorError), safe_open(path, "pt") as weights:  # loading names the fault
            shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
            total += 4 * sum(map(math.prod, shapes))
    require_memory(copies * total, f"{work} of {name}", best_device())
