"""What the tests of operations share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """use(kernel): attention is by it, whatever the dispatch table would say of the device."""

    def by(kernel: str) -> None:
        monkeypatch.setattr("clearhead.ops.attention.select_kernel", lambda *_, **__: kernel)

    return by


@pytest.fixture(scope="session")
def make_masks() -> Callable[[int, str, bool], dict[str, Tensor | None]]:
    """Makes the padding ("none", "left", "right", "holes") and documents of two rows of keys."""

    def make(keys: int, padding: str, packed: bool) -> dict[str, Tensor | None]:
        mask = torch.ones(2, keys, dtype=torch.bool)
        if padding == "left":
            mask[1, : keys // 3] = False
        if padding == "right":
            mask[0, keys - keys // 4 :] = False
        if padding == "holes":
            mask = torch.rand(2, keys) > 0.4
        # Documents of unequal length, one of which comes back.
        segments = torch.arange(keys) * 4 // keys % 3
        return {
            "key_mask": None if padding == "none" else mask,
            "segments": segments.expand(2, -1) if packed else None,
        }

    return make
