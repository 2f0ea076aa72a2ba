"""Training in two processes against one; resuming from a checkpoint."""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.race import Ratio
from clearhead.errors import ClearheadError
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.loading import best_device
from clearhead.named_models import SIZES
from clearhead.train import Callback, Run, StepMetrics, TrainConfig, train


def resuming(rounds: int) -> Iterator[Ratio]:
    """Seconds from the start of `clearhead train --resume` to its first step, against 20: 102 M
    parameters with their AdamW state; and CPU seconds, which other work does not change."""
    shape = ("hidden_size=768", "num_hidden_layers=14", "num_attention_heads=12")
    taken: dict[str, list[float]] = {"resuming": [], "resuming, CPU": []}
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--set", *shape, "intermediate_size=2048", "--output", str(run)]
        words += ["--train.sequence-length", "32", "--train.batch-size", "1"]
        words += ["--train.save-every", "2", "--data.limit", "1000000", "--data.cache", folder]
        _train_until(lambda: any(run.glob("checkpoints/step-*")), words)
        steps = run / "metrics.jsonl"
        for _ in range(rounds):
            steps.unlink()
            times = _train_until(lambda: _size(steps) > 0, ["--resume", str(run)])
            for seconds, found in zip(taken.values(), times, strict=True):
                seconds.append(found)
    for name, seconds in taken.items():
        yield Ratio(
            name=name,
            ours="the first step after --resume",
            peer="20 s",
            ratio=min(seconds) / 20,
            bound=1.0,
            seconds={name: seconds},
        )


def processes(rounds: int) -> Iterator[Ratio]:
    """Seconds a token of two processes of one thread against one, the best of all rounds; and CPU
    seconds, which other work on the machine does not change."""
    sides = {"one process": 1, "two processes": 2}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, count in sides.items():
            found[side].append(_in_processes(count))
    for name, unit in (("processes", "seconds"), ("processes, CPU", "CPU seconds")):
        seconds = {side: [one[unit] for one in measured] for side, measured in found.items()}
        yield Ratio(
            name=name,
            ours="two processes",
            peer="one process",
            ratio=min(seconds["two processes"]) / min(seconds["one process"]),
            bound=1 / 1.7,
            seconds=seconds,
        )


class _Times(Callback):
    """When each step began and ended."""

    def __init__(self) -> None:
        self.began = list[tuple[float, float]]()
        self.ended = list[tuple[float, float]]()

    def start(self, run: Run) -> None:
        run.model.register_forward_pre_hook(self.begin)

    def begin(self, *_: object) -> None:
        self.began.append((time.perf_counter(), time.process_time()))

    def step(self, metrics: StepMetrics) -> None:
        self.ended.append((time.perf_counter(), time.process_time()))

    def steps(self, clock: int = 0) -> list[float]:
        """Seconds of each step by the wall's clock, or by the CPU's."""
        pairs = zip(self.began, self.ended, strict=True)
        return [end[clock] - start[clock] for start, end in pairs]


class _Batches:
    """Random tokens."""

    fingerprint = "random"

    def __init__(self, shape: tuple[int, int], vocabulary: int) -> None:
        self.shape, self.vocabulary = shape, vocabulary

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self.vocabulary, self.shape, generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _train(size: str, output: Path, steps: int, times: _Times, *, rows: int, length: int) -> None:
    """Train the baseline of a size in float32."""
    model = ClearheadForCausalLM(preset("transformer", **SIZES[size])).to(best_device())
    config = TrainConfig(
        tokens=steps * rows * length,
        sequence_length=length,
        batch_size=rows,
        precision="fp32",
        log_every=1,
    )
    batches = _Batches((rows, length), SIZES[size]["vocab_size"])
    train(model, batches, config, output=output, callbacks=[times])


def _train_until(done: Callable[[], bool], words: list[str]) -> tuple[float, float]:
    """Kill `clearhead train` once it is `done`: seconds that it took, and CPU seconds."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    job = subprocess.Popen(
        [sys.executable, "-m", "clearhead", "train", *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    while not done():
        if job.poll() is not None:
            raise ClearheadError(f"clearhead train {shlex.join(words)} ended too early")
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    job.kill()
    job.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _in_processes(count: int) -> dict[str, float]:
    """Seconds a token in so many processes of one thread each."""
    with TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*torchrun, "--nproc-per-node", str(count), "-m", "benchmarks.scale", folder],
            check=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        result: dict[str, float] = json.loads(Path(folder, "result.json").read_text())
        return result


def _pace(folder: Path) -> None:
    """Train a small model for a few steps as one of several processes; the first writes."""
    times = _Times()
    _train("small", folder / "run", 3, times, rows=4, length=256)
    if times.ended:  # in the first process
        tokens = 4 * 256
        pace = {"seconds": min(times.steps()) / tokens, "CPU seconds": min(times.steps(1)) / tokens}
        (folder / "result.json").write_text(json.dumps(pace))


if __name__ == "__main__":
    _pace(Path(sys.argv[1]))
