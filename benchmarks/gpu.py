"""Tests and figures of a GPU in four minutes each: `make gpu-check`, `make gpu-figures`.

The seconds of `PARTS` add up to 227 and 240: a part stops where its own are over, and make ends
both at 250. Needs PyTorch and transformers alone. A part runs by its name, as in
`python -m benchmarks.gpu figures loss`; `--device cpu --toy` runs it at sizes of a test.
"""

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import gpu_checks, gpu_figures
from benchmarks.race import Ratio
from clearhead.records import jsonl


class Part(NamedTuple):
    """A part's function, and the seconds that it may take on an H100."""

    run: Callable[[gpu_checks.Setting], Iterator[Ratio]]
    seconds: int


def _versions(setting: gpu_checks.Setting) -> Iterator[Ratio]:
    names = ("torch", "transformers", "triton", "liger-kernel")
    for name in names:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "is not installed")
    yield from ()


def _kernel_tests(setting: gpu_checks.Setting) -> Iterator[Ratio]:
    """The tests marked `gpu`, by 14 workers where pytest-xdist is installed."""
    if not setting.cuda:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/ops", "tests/models"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "14", "--dist", "worksteal"]
    started = time.perf_counter()
    failed = subprocess.run(command, timeout=setting.left(), check=False).returncode
    seconds = {"tests": [time.perf_counter() - started]}
    yield Ratio(
        name="tests of kernels", ours="failed", peer="", ratio=failed, bound=0.0, seconds=seconds
    )


PARTS: Mapping[str, Mapping[str, Part]] = {
    "check": {
        "versions": Part(_versions, 2),
        "presets": Part(gpu_checks.presets, 120),
        "gradients": Part(gpu_checks.gradients, 165),
        "scores": Part(gpu_checks.scores, 45),
        "tests": Part(_kernel_tests, 110),
    },
    "figures": {
        "compilation": Part(gpu_figures.compilation, 165),
        "loss": Part(gpu_figures.loss, 40),
        "steps": Part(gpu_figures.steps, 130),
        "attention": Part(gpu_figures.attention, 35),
        "decoding": Part(gpu_figures.decoding, 40),
        "generation": Part(gpu_figures.generation, 30),
    },
}


def main(words: list[str] | None = None) -> int:
    """Run the parts; 1 where an aim is missed or a part fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("kind", choices=PARTS)
    parser.add_argument("parts", nargs="*", help="all unless given")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="sizes of a test")
    parser.add_argument("--output", type=Path, help="append JSON lines, as of `clearhead bench`")
    options = parser.parse_args(words)
    parts = PARTS[options.kind]
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here: give --device cpu --toy for a trial")
    rows, missed = [], False
    for name in options.parts or parts:
        print(f"== {name}", flush=True)
        end = time.perf_counter() + parts[name].seconds * (1 if options.device == "cuda" else 100)
        setting = gpu_checks.Setting(torch.device(options.device), options.toy, end)
        started = time.perf_counter()
        try:
            for ratio in parts[name].run(setting):
                rows.append(ratio)
                print(row_of(ratio), flush=True)
                if options.output is not None:
                    jsonl.append(options.output, ratio.record())
        except Exception as error:  # the other parts go on
            missed = True
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        print(f"== {name} took {time.perf_counter() - started:.0f} s", flush=True)
    print("\n| | of | value | at most | |\n| --- | --- | --- | --- | --- |")
    print("\n".join(row_of(ratio) for ratio in rows))
    missed |= any(ratio.bound is not None and not ratio.ratio <= ratio.bound for ratio in rows)
    return int(missed)


def row_of(ratio: Ratio) -> str:
    """A line of the table."""
    bound, verdict = "", ""
    if ratio.bound is not None:
        bound = f"{ratio.bound:.3g}"
        verdict = "reached" if ratio.ratio <= ratio.bound else "NOT reached"
    title = f"{ratio.name}: {ratio.ours}"
    return f"| {title} | {ratio.peer} | {ratio.ratio:.3g} | {bound} | {verdict} |"


if __name__ == "__main__":
    sys.exit(main())
