"""The number of our files that a forward pass with labels executes: what a reader has to read."""

import statistics
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import clearhead
from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset, presets

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
HOME = str(Path(clearhead.__file__).parent)


def _files(name: str) -> set[str]:
    config = preset(name, **SHAPE)
    kind = ClearheadForCausalLM if config.direction == "causal" else ClearheadForMaskedLM
    model, ids = kind(config), torch.randint(0, 61, (2, 9))
    model(input_ids=ids, labels=ids)  # kernels are chosen at the first call
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model(input_ids=ids, labels=ids)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer is at work")
def test_a_forward_pass_executes_few_files():
    counts = {name: len(_files(name)) for name in presets()}
    assert statistics.median(counts.values()) <= 21, counts
    assert counts["transformer"] <= 19, counts
