"""OrthoAdam against AdamW, and against the way others write it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from benchmarks.training import FOR_LIFE, SHAPES, optimizer_step
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.optim.rotations import haar
from clearhead.train import TrainConfig
from clearhead.train.compiling import compiled

# The shape of OrthoAdam's figures: 16k tokens a step.
OPTIMIZER_SHAPE: dict[str, Any] = {**SHAPES["cpu"], "hidden_size": 512, "intermediate_size": 1408}
OPTIMIZER_BATCH, OPTIMIZER_LENGTH = 32, 512


def orthoadam(rounds: int) -> Iterator[Ratio]:
    """OrthoAdam: a whole training step, the optimizer's step alone, and the memory it keeps."""
    model = ClearheadForCausalLM(preset("transformer", **OPTIMIZER_SHAPE))
    model.to(best_device()).train()
    FOR_LIFE.enter_context(compiled(model, "blocks"))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "AdamW": build_optimizer(model, TrainConfig(learning_rate=1e-4)),
        "OrthoAdam, hadamard": _orthoadam(model, "hadamard"),
        "OrthoAdam, haar": _orthoadam(model, "haar"),
        "dense products in Python": DenseOrthoAdam(model.parameters(), lr=1e-4),
    }
    ids = torch.randint(
        0, OPTIMIZER_SHAPE["vocab_size"], (OPTIMIZER_BATCH, OPTIMIZER_LENGTH), device=best_device()
    )
    names = list(optimizers)[:3]
    seconds = take_turns(
        {name: optimizer_step(model, optimizers[name], ids) for name in names}, rounds
    )
    for ours, bound in ((names[1], 1.10), (names[2], 1.20)):
        yield ratio_of("orthoadam-training-step", ours, names[0], bound, seconds)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds = take_turns({name: o.step for name, o in optimizers.items()}, rounds)
    for ours in names[1:]:
        peer = "dense products in Python"
        yield ratio_of("orthoadam-optimizer-step", ours, peer, 0.333, seconds)


def _orthoadam(model: nn.Module, rotation: Any) -> torch.optim.Optimizer:
    config = TrainConfig(learning_rate=1e-4, optimizer="orthoadam", rotation=rotation)
    return build_optimizer(model, config)


class DenseOrthoAdam(torch.optim.Optimizer):
    """The usual form, a peer to time: dense products, parameter by parameter, in Python.

    It rotates columns, as ours does.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        sizes = {p.shape[1] for p in self.param_groups[0]["params"] if p.ndim == 2}
        self.rotations = {
            n: haar(n, torch.Generator().manual_seed(n)).float().to(best_device()) for n in sizes
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            q = self.rotations[p.shape[1]] if p.ndim == 2 else None
            gradient = p.grad if q is None else p.grad @ q.T
            m = state["m"].mul_(0.9).add_(gradient, alpha=0.1)
            v = state["v"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            m_hat = m / (1 - 0.9 ** state["step"])
            update = m_hat / ((v / (1 - 0.95 ** state["step"])).sqrt() + 1e-8)
            update = update if q is None else update @ q
            p.add_(update, alpha=-self.param_groups[0]["lr"])
