"""Shared by every test: a fixed seed, and one thread, so that tests can run side by side."""

import os

# Before transformers reads it: no test waits for a network that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
