"""clearhead bench: speed, as ratios."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.experiments.bench import BENCHES
from clearhead.ranges import Count

Bench = Literal[
    "training-step",
    "kernel",
    "attention",
    "memory",
    "blocks",
    "encoders",
    "orthoadam",
    "diagnose",
    "quantize",
    "passkey",
    "sliding",
    "choices",
    "demo",
]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Which figures to measure."""

    names: Positional[tuple[Bench, ...]] = ("training-step", "kernel")
    """Benchmarks."""
    rounds: Count = 9
    """Turns that each side takes."""
    output: Path | None = None
    """Append the results to this file, one JSON line each."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="bench",
        description="Measure in turns with a named peer, in one run; the ratio counts.",
    )
    for name in command.names:
        for found in BENCHES[name](command.rounds):
            aim = ""
            if found.bound is not None:
                verdict = "reached" if found.ratio <= found.bound else "NOT reached"
                aim = f" (aim: at most {found.bound:.3g} ×: {verdict})"
            told = f"{found.name}: {found.ours} takes {found.ratio:.3f} × {found.peer}{aim}"
            print(told, flush=True)
            if command.output is not None:
                with command.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found.record()) + "\n")
    return 0
