"""Every attention of the axes trains; which of them fit (with hostile numbers: tests/attack)."""

from typing import Any

import pytest
import torch

from clearhead import ClearheadForCausalLM
from clearhead.nn import REGISTRY

from . import space


def _train(model: Any, ids: torch.Tensor) -> None:
    """Three steps; every gradient finite, and of every parameter one that is not zero.

    What starts at 0 keeps others from moving: a gain W_Q, and that W_K.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moved = set()
    for step in range(3):
        for module in model.modules():  # what training moves beside the weights
            if step and hasattr(module, "on_step_end"):
                module.on_step_end(step / 3)
        model(ids, labels=ids).loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            if (p.grad != 0).any():
                moved.add(name)
        optimizer.step()
        optimizer.zero_grad()
    still = {name for name, _ in model.named_parameters()} - moved
    assert not still


@pytest.mark.parametrize("scores", REGISTRY.names("scores"))
def test_every_attention_trains(scores):
    ids = torch.randint(0, 31, (2, 7))
    for point in space.some_attentions():
        if point["scores"] == scores:
            _train(ClearheadForCausalLM(space.config(**point)), ids)


def test_the_table_of_what_fits():
    """15 places to compare and count from, times 4 normalizers, times 3 kinds of maps; and with
    dot products a key bias from 8 places, a learned key and value from 7."""
    assert len(space.attentions()) == 15 * 12 + 8 * 3 + 7 * 3
    for point in space.attentions():
        both_ways = space.config(direction="bidirectional", **point)
        assert (both_ways is None) == (point["position"] in ("alibi", "forget", "xpos"))
    assert space.config(position="alibi", scores="coca") is None
