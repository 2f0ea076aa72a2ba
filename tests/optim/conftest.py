"""What the tests of optimizers share."""

import importlib.util
import sys
from pathlib import Path

# Test folders are no packages: the helper is loaded by its path, before any test module asks.
_spec = importlib.util.spec_from_file_location(
    "tests_optim_trials", Path(__file__).with_name("trials.py")
)
assert _spec is not None
assert _spec.loader is not None
sys.modules["tests_optim_trials"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["tests_optim_trials"])
