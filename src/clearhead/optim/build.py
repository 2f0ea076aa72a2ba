"""From a config to an optimizer: the one place that later optimizers join."""

from typing import Protocol

import torch
from torch import nn

from clearhead.optim.groups import decay_groups

# One kernel per step instead of one per operation. Elementwise, so its results do not depend on
# the order of threads; other devices take PyTorch's own default.
FUSED_DEVICES = ("cpu", "cuda")


class OptimizerConfig(Protocol):
    """What `build_optimizer` reads; `clearhead.train.TrainConfig` has it all."""

    @property
    def learning_rate(self) -> float:
        """The peak; the training loop sets each step's own rate."""

    @property
    def weight_decay(self) -> float:
        """Decoupled decay of the matrices (see `decay_groups`)."""

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and second moment."""

    @property
    def epsilon(self) -> float:
        """Added to the root of the second moment."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over `decay_groups(model)`, fused where the device has it.

    The state must be made of tensors, one set per parameter: that is what a checkpoint stores.
    """
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True if device.type in FUSED_DEVICES else None,
    )
