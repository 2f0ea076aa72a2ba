"""A penalty on outliers among the inputs of linear layers, which ruin a scale that they share.

Of the input x_TC of a layer, T tokens of one text with C channels:

    P(x) = 1/T Σ_tc max(0, |x_tc| / (8 r) − 1)²,    r = √(mean of x²), held fixed in the gradient

The penalty of a step is the mean of P over layers and texts. Nothing below 8 r has a gradient, and
scaling a whole text's input changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BEYOND = 8.0  # times the root mean square


def excess(x_BTC: Tensor) -> Tensor:
    """P of each text, [B], in float32 at least."""
    x_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
    r_B11 = x_BTC.detach().square().mean((1, 2), keepdim=True).sqrt()
    tiny = torch.finfo(x_BTC.dtype).tiny  # of a text of zeros
    over_BTC = (x_BTC.abs() / (BEYOND * r_B11).clamp_min(tiny) - 1).clamp_min(0)
    return over_BTC.square().sum(2).mean(1)


class Penalty:
    """The penalty of each forward pass in training mode, times a weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._found = list[Tensor]()

    def observe(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the input of a linear layer: a forward hook."""
        if layer.training and torch.is_grad_enabled():
            self._found.append(excess(inputs[0]).sum())

    def take(self) -> Tensor:
        """Weight × the mean over layers, summed over the texts since the last call."""
        found, self._found = self._found, []
        return self.weight * torch.stack(found).mean()


@contextmanager
def penalised(model: nn.Module, weight: float) -> Iterator[Penalty | None]:
    """Observe every linear layer of the model but its head and adapters; None where weight is 0."""
    if not weight:
        yield None
        return
    penalty, head = Penalty(weight), model.get_output_embeddings()  # type: ignore[operator]
    hooks = [
        module.register_forward_pre_hook(penalty.observe)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and ".lora_" not in name
    ]
    try:
        yield penalty
    finally:
        for hook in hooks:
            hook.remove()
