"""Several optimizers that look like one."""

from collections.abc import Callable
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps each of its parts; state and groups are those of the parts, in their order.

    Made for optimizers that take matrices only, with AdamW for the rest.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def _share(self) -> None:
        """Let the parts work on this one's state and groups, so that there is only one of each."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:last]
            first = last
