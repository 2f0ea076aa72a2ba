"""Time clearhead and a named peer in turns, in one process, and print the ratio. Needs a checkout
of the repository.

examples:
  clearhead bench kernel attention
  clearhead bench training-step --rounds 5 --output results/bench.jsonl
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.errors import ClearheadError, choose
from clearhead.metavars import Benchmark
from clearhead.ranges import Count
from clearhead.records import jsonl

CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Figures to measure."""

    names: Positional[tuple[Benchmark, ...]] = ("training-step", "kernel")
    """Benchmarks: training-step, kernel, attention, memory, lengths, decoding, blocks,
    encoders, orthoadam, diagnose, quantize, passkey, processes, resuming, sliding, tokens,
    turned, start, demo, view."""
    rounds: Count = 9
    """Turns that each side takes."""
    output: Path | None = None
    """Append the results to this file, one JSON line each."""


def run(command: Command) -> int:
    if not (CHECKOUT / "benchmarks" / "__init__.py").is_file():  # as in a wheel
        raise ClearheadError("benchmarks are not part of an installed clearhead: clone it")
    sys.path.insert(0, str(CHECKOUT))
    benchmarks = importlib.import_module("benchmarks")
    names = [choose("benchmark", name, benchmarks.BENCHES) for name in command.names]
    for bench in map(benchmarks.find, names):
        for result in bench(command.rounds):
            aim = ""
            if result.bound is not None:
                verdict = "reached" if result.ratio <= result.bound else "NOT reached"
                aim = f" (aim: at most {result.bound:.3g} ×: {verdict})"
            line = f"{result.name}: {result.ours} takes {result.ratio:.3f} × {result.peer}{aim}"
            print(line, flush=True)
            if command.output is not None:
                jsonl.append(command.output, result.record())
    return 0
