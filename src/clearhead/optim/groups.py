"""Which parameters decay: matrices do, everything else does not."""

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into a group that decays and one that does not.

    Every parameter of two or more dimensions decays: projections, and embeddings too, whether or
    not they are tied to the output head (tied, they *are* the head's matrix; untied, a rule that
    told them apart would have to know each architecture's names). Norms, biases, gains and lambdas
    have fewer dimensions and stay where the loss puts them. A tied parameter appears once; a frozen
    one not at all; an empty group is left out.

    Returns:
        Groups as `torch.optim` takes them, each with "params" and "weight_decay".
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
