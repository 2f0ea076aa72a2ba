"""Shared by every test: a fixed seed, and one thread, so that tests can run side by side."""

import importlib.util
import os
import sys
from pathlib import Path

# Before transformers reads it: no test waits for a network that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Test folders are no packages: what several floors share is loaded by its path.
_spec = importlib.util.spec_from_file_location(
    "tests_architectures", Path(__file__).with_name("architectures.py")
)
assert _spec is not None
assert _spec.loader is not None
sys.modules["tests_architectures"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["tests_architectures"])


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
