"""Gains of the two branches: trained, or moved from step to step by the training run.

`clearhead.nn.annealing` calls a module's `on_step_end(done)` after every step, with the part of the
run that is done, from 0 to 1. The module keeps its numbers in buffers, which checkpoints hold.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.spec import Declaration, LayerSpec


class Trainable(nn.Module):
    """x · β, β a trained number."""

    gain: Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.hold(torch.empty(1))
        self.reset_parameters()

    def hold(self, gain: Tensor) -> None:
        """Keep the gain as a parameter, or as a buffer where the run moves it."""
        self.gain = nn.Parameter(gain)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gain


class Scheduled(Trainable):
    """x · β · t, t the part of the run that is done: the branch grows from nothing.

    The gain never falls, so a trained model can be trained further.
    """

    def hold(self, gain: Tensor) -> None:
        self.register_buffer("gain", gain)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gain)

    def on_step_end(self, done: float) -> None:
        self.gain.clamp_(min=self.start * done)


def gain(kind: Callable[[float], nn.Module], start: float | None) -> nn.Module | None:
    """The gain of a branch; None where it has none."""
    return None if start is None else kind(start)


def _refuses(layer: LayerSpec) -> str | None:
    """Reason why training cannot move the gains by itself, or None."""
    gains = {"attention_gain": layer.attention_gain, "mlp_gain": layer.mlp_gain}
    given = {name: start for name, start in gains.items() if start is not None}
    if not given:
        return "no branch has a gain to move: give attention_gain or mlp_gain a start, such as 0.1"
    for name, start in given.items():
        if start <= 0:
            return f"it multiplies {name}={start}: give a start above 0, such as 0.1"
    return None


def _silent(layer: LayerSpec) -> str | None:
    """Reason why no gradient passes a branch that starts at 0, or None."""
    alone = "would write nothing at the start, and no skip passes by it: make that gain null"

    def from_zero(gain: float | None) -> bool:
        return gain == 0 or (gain is not None and layer.residual_scale == "scheduled")

    if layer.attention_skip == "none" and from_zero(layer.attention_gain):
        return f"attention with attention_gain={layer.attention_gain} {alone}"
    skipped = layer.mlp_skip == "identity" and layer.mlp_skip_gain != 0
    if layer.order == "sequential" and not skipped and from_zero(layer.mlp_gain):
        return f"the MLP with mlp_gain={layer.mlp_gain} {alone}"
    return None


DECLARATIONS = (
    Declaration(
        "residual_scale",
        "trainable",
        "attention_gain and mlp_gain, where given, are trained",
        "arXiv 2311.01906, section 4.1",
        Trainable,
        refuses=_silent,
    ),
    Declaration(
        "residual_scale",
        "scheduled",
        "they grow from 0 to what is given, in proportion to the training done",
        "a reading of arXiv 2311.01906 for norm-free blocks",
        Scheduled,
        refuses=lambda layer: _silent(layer) or _refuses(layer),
    ),
)
