"""Speed as a ratio: every figure is measured beside a named peer, in turns, in one process.

Machines are shared and noisy, so seconds alone say little: the sides take turns, each side's
figure is the median over rounds, and what counts is the quotient. `clearhead bench` runs them.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.race import Ratio

# Name → module and function, imported when it is run.
BENCHES: Mapping[str, tuple[str, str]] = {
    "training-step": ("training", "training_step"),
    "kernel": ("attention", "kernel"),
    "attention": ("attention", "layers"),
    "memory": ("attention", "memory"),
    "lengths": ("kernels", "lengths"),
    "decoding": ("kernels", "decoding"),
    "blocks": ("blocks", "blocks"),
    "encoders": ("encoders", "encoders"),
    "orthoadam": ("optimizer", "orthoadam"),
    "diagnose": ("diagnosis", "diagnosis"),
    "quantize": ("quantize", "quantize"),
    "passkey": ("evaluation", "passkey"),
    "processes": ("scale", "processes"),
    "resuming": ("scale", "resuming"),
    "sliding": ("evaluation", "sliding_windows"),
    "tokens": ("tokens", "tokens"),
    "turned": ("turned", "turned"),
    "start": ("start", "start"),
    "demo": ("demo", "demo"),
    "view": ("view", "view"),
}


def find(name: str) -> "Callable[[int], Iterator[Ratio]]":
    """The benchmark of this name: a function of the number of rounds."""
    module, function = BENCHES[name]
    bench: Callable[[int], Iterator[Ratio]] = getattr(
        importlib.import_module(f"benchmarks.{module}"), function
    )
    return bench
