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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead import ops
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.optim import OrthoAdam, build_optimizer
from clearhead.optim.rotations import haar
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

# The shape of OrthoAdam's figures: 16k tokens a step.
OPTIMIZER_SHAPE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 512,
    "intermediate_size": 1408,
}
OPTIMIZER_BATCH, OPTIMIZER_LENGTH = 32, 512


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


def orthoadam(rounds: int) -> Iterator[Ratio]:
    """OrthoAdam: a whole training step, the optimizer's step alone, and the memory it keeps."""
    model = ClearheadForCausalLM(preset("transformer", **OPTIMIZER_SHAPE))
    model.to(_device()).train()
    compiled(model, "blocks").__enter__()  # for the life of this process
    optimizers: dict[str, torch.optim.Optimizer] = {
        "AdamW": build_optimizer(model, TrainConfig(learning_rate=1e-4)),
        "OrthoAdam, hadamard": build_optimizer(
            model, TrainConfig(learning_rate=1e-4, optimizer="orthoadam", rotation="hadamard")
        ),
        "OrthoAdam, haar": build_optimizer(
            model, TrainConfig(learning_rate=1e-4, optimizer="orthoadam", rotation="haar")
        ),
        "dense products in Python": DenseOrthoAdam(model.parameters(), lr=1e-4),
    }
    ids = torch.randint(
        0, OPTIMIZER_SHAPE["vocab_size"], (OPTIMIZER_BATCH, OPTIMIZER_LENGTH), device=_device()
    )
    names = list(optimizers)[:3]
    seconds = take_turns(
        {name: _training_step(model, optimizers[name], ids) for name in names}, rounds
    )
    for ours, bound in ((names[1], 1.10), (names[2], 1.20)):
        yield _ratio("orthoadam-training-step", ours, names[0], bound, seconds)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds = take_turns({name: o.step for name, o in optimizers.items()}, rounds)
    yield _ratio("orthoadam-optimizer-step", names[1], "dense products in Python", 0.333, seconds)
    hadamard = optimizers[names[1]]
    assert isinstance(hadamard, OrthoAdam)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield Ratio(
        name="orthoadam-memory",
        ours="numbers of hadamard rotations",
        peer="parameters",
        ratio=hadamard.rotation_numel() / parameters,
        bound=0.01,
        seconds={},
    )


class DenseOrthoAdam(torch.optim.Optimizer):
    """How others write it: dense products, parameter by parameter, in Python. A peer to time.

    It rotates the axes that ours does: all but the vocabulary's.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        sizes = {n for p in self.param_groups[0]["params"] if p.ndim == 2 for n in p.shape}
        self.rotations = {
            n: haar(n, torch.Generator().manual_seed(n)).float().to(_device())
            for n in sizes - {OPTIMIZER_SHAPE["vocab_size"]}
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            left, right = (
                self.rotations.get(n) if p.ndim == 2 else None for n in (p.shape[0], p.shape[-1])
            )
            gradient = p.grad
            gradient = gradient if left is None else left @ gradient
            gradient = gradient if right is None else gradient @ right.T
            m = state["m"].mul_(0.9).add_(gradient, alpha=0.1)
            v = state["v"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            m_hat = m / (1 - 0.9 ** state["step"])
            update = m_hat / ((v / (1 - 0.95 ** state["step"])).sqrt() + 1e-8)
            update = update if left is None else left.T @ update
            update = update if right is None else update @ right
            p.add_(update, alpha=-self.param_groups[0]["lr"])


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
    "orthoadam": orthoadam,
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

    kept = {side: times for side, times in seconds.items() if side.startswith((ours, peer))}
    return _ratio(name, fastest(ours), fastest(peer), bound, kept)


def _ratio(name: str, ours: str, peer: str, bound: float, seconds: dict[str, list[float]]) -> Ratio:
    ratio = statistics.median(seconds[ours]) / statistics.median(seconds[peer])
    return Ratio(name=name, ours=ours, peer=peer, ratio=ratio, bound=bound, seconds=seconds)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _step(model: nn.Module, path: str) -> Callable[[], None]:
    """One optimizer step by AdamW; ours compiles its layers, a peer the whole model."""
    model.to(_device()).train()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-4))
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH), device=_device())
    if path == "compiled":
        if isinstance(model, ClearheadForCausalLM):
            compiled(model, "blocks").__enter__()  # for the life of this process
        else:
            model.compile()
    return _training_step(model, optimizer, ids)


def _training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> Callable[[], None]:
    """A whole step under bf16 autocast."""

    def step() -> None:
        with precision.autocast("bf16", ids.device):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
