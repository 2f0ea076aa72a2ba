"""Speed as a ratio: every figure is measured beside a named peer, in turns, in one process.

Machines are shared and noisy, so seconds alone say little: the sides take turns, each side's
figure is the median over rounds, and what counts is the quotient.
"""

import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead import ops
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.optim import build_optimizer
from clearhead.train import TrainConfig, precision
from clearhead.train.compiling import compiled

# The shape of the figure in docs/performance.md.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 704,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
BATCH, LENGTH = 8, 512


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours against a peer: the faster path of each, and what was promised of the quotient."""

    name: str
    ours: str
    peer: str
    ratio: float
    bound: float
    seconds: dict[str, list[float]]

    def record(self) -> dict[str, Any]:
        """One JSON line, with the machine and the versions."""
        device = "cpu"
        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        return {
            "kind": "bench",
            **vars(self),
            "device": f"{device}, {torch.get_num_threads()} CPU threads, {platform.machine()}",
            "versions": {name: version(name) for name in ("clearhead", "torch", "transformers")},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def training_step(rounds: int) -> Iterator[Ratio]:
    """A whole training step against transformers' Llama and DiffLlama, each by its faster path."""
    from transformers import (
        DiffLlamaConfig,
        DiffLlamaForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    shape = {**SHAPE, "tie_word_embeddings": True, "use_cache": False}
    makers: dict[str, Callable[[], nn.Module]] = {
        "transformer": lambda: ClearheadForCausalLM(preset("transformer", **SHAPE)),
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "differential": lambda: ClearheadForCausalLM(preset("differential", **SHAPE)),
        "DiffLlama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**shape)),
    }
    steps = {
        f"{name}, {path}": _step(make(), path)
        for name, make in makers.items()
        for path in ("eager", "compiled")
    }
    seconds = take_turns(steps, rounds)
    for ours, peer, bound in (("transformer", "Llama", 0.85), ("differential", "DiffLlama", 0.95)):
        yield _faster_paths("training-step", ours, peer, bound, seconds)


def attention(rounds: int) -> Iterator[Ratio]:
    """Forward and backward of softmax-1 against PyTorch's own softmax attention."""
    shape = (BATCH, SHAPE["num_attention_heads"], LENGTH, 32)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run(function: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            function(q, k, v).sum().backward()
            q.grad = k.grad = v.grad = None

        return step

    def softmax1(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, k, v, sink=0.0)

    def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    seconds = take_turns(
        {
            "softmax-1, eager": run(softmax1),
            "softmax-1, compiled": run(torch.compile(softmax1)),
            "PyTorch softmax, eager": run(softmax),
            "PyTorch softmax, compiled": run(torch.compile(softmax)),
        },
        rounds,
    )
    yield _faster_paths("attention", "softmax-1", "PyTorch softmax", 1.1, seconds)


def demo(rounds: int) -> Iterator[Ratio]:
    """`make demo`'s job, once, after installation: against five minutes and four GiB."""
    clearhead = shutil.which("clearhead", path=str(Path(sys.executable).parent)) or "clearhead"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [clearhead, "compare", "--output", folder], check=True, stdout=subprocess.DEVNULL
        )
        took = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    for ours, peer, ratio in (
        ("demo, seconds", "300 s", took / 300),
        ("demo, bytes at the peak", "4 GiB", peak / 2**32),
    ):
        yield Ratio(
            name="demo", ours=ours, peer=peer, ratio=ratio, bound=1.0, seconds={"demo": [took]}
        )


BENCHES: Mapping[str, Callable[[int], Iterator[Ratio]]] = {
    "training-step": training_step,
    "attention": attention,
    "demo": demo,
}


def take_turns(sides: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after two unmeasured calls (the first one compiles)."""
    for step in sides.values():
        step()
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


def _faster_paths(
    name: str, ours: str, peer: str, bound: float, seconds: dict[str, list[float]]
) -> Ratio:
    medians = {side: statistics.median(times) for side, times in seconds.items()}

    def fastest(prefix: str) -> str:
        return min((s for s in medians if s.startswith(f"{prefix}, ")), key=medians.__getitem__)

    a, b = fastest(ours), fastest(peer)
    kept = {side: times for side, times in seconds.items() if side.startswith((ours, peer))}
    return Ratio(
        name=name, ours=a, peer=b, ratio=medians[a] / medians[b], bound=bound, seconds=kept
    )


def _step(model: nn.Module, path: str) -> Callable[[], None]:
    """One optimizer step under bf16 autocast; ours compiles its layers, a peer the whole model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-4))
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH), device=device)
    if path == "compiled":
        if isinstance(model, ClearheadForCausalLM):
            compiled(model, "blocks").__enter__()  # for the life of this process
        else:
            model.compile()

    def step() -> None:
        with precision.autocast("bf16", device):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
