"""Calls and files of ours in a forward pass with labels: what a reader has to read."""

import statistics
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import clearhead
from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset, presets

from .space import WHOLE

SHAPE = WHOLE | {"num_hidden_layers": 1}
HOME = str(Path(clearhead.__file__).parent)


def _calls(name: str) -> list[str]:
    """The file of each call of ours."""
    config = preset(name, **SHAPE)
    kind = ClearheadForCausalLM if config.direction == "causal" else ClearheadForMaskedLM
    model, ids = kind(config), torch.randint(0, 61, (2, 9))
    model(input_ids=ids, labels=ids)  # kernels are chosen at the first call
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            calls.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model(input_ids=ids, labels=ids)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer is at work")
def test_a_forward_pass_makes_few_calls_in_few_files():
    calls = {name: _calls(name) for name in presets()}
    counts = {name: len(own) for name, own in calls.items()}
    files = {name: len(set(own)) for name, own in calls.items()}
    assert statistics.median(counts.values()) <= 61, counts
    assert counts["transformer"] <= 51, counts
    assert statistics.median(files.values()) <= 15, files
    assert files["transformer"] <= 13, files
