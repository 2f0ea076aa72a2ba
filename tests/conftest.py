"""Shared by every test: a fixed seed, and one thread, so that tests can run side by side."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
