"""Keys and values that several query heads share."""

from torch import Tensor


def repeat(x_BGSN: Tensor, heads: int, together: int = 1) -> Tensor:
    """[B, G, S, N] → [B, H, S, N]: head h gets group h // (H / G).

    With `together` = 2 neighbours stay beside each other, and pair h gets pair h // (H / G).
    """
    groups = x_BGSN.shape[1]
    if groups == heads:
        return x_BGSN
    return x_BGSN.unflatten(1, (-1, together)).repeat_interleave(heads // groups, 1).flatten(1, 2)


def add(x_BHSN: Tensor, groups: int) -> Tensor:
    """[B, H, S, N] → [B, G, S, N]: the gradient of `repeat`."""
    return x_BHSN if x_BHSN.shape[1] == groups else x_BHSN.unflatten(1, (groups, -1)).sum(2)
