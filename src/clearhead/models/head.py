"""The output head in a loss: its weight, or the logits that it gives."""

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.models.checks import IGNORED


def read_by(head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Hidden states and the head's weight; or logits and None.

    Logits where the weight is not all of the head: under adapters, quantised, with a bias, or
    offloaded by accelerate, which brings the weight for the time of a call alone.
    """
    if type(head) is nn.Linear and head.bias is None and not hasattr(head, "_hf_hook"):
        return x, head.weight
    return head(x), None


def summed_loss(x_ND: Tensor, weight_VD: Tensor | None, target_N: Tensor) -> Tensor:
    """Σ −log p(target), float32 at least, over the rows whose target counts.

    Args:
        x_ND, weight_VD: as `read_by` gives them.
    """
    if weight_VD is not None:
        return ops.linear_cross_entropy(x_ND, weight_VD, target_N, ignore_index=IGNORED)
    exact = torch.promote_types(x_ND.dtype, torch.float32)
    target_N = target_N.to(x_ND.device)
    return nn.functional.cross_entropy(
        x_ND.to(exact), target_N, ignore_index=IGNORED, reduction="sum"
    )
