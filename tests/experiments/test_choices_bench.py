"""The two sides of `clearhead bench choices` find the same."""

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.experiments.bench import choices


@pytest.mark.parametrize("harness", [True, False])
def test_both_sides_find_the_same(monkeypatch, harness):
    if harness:
        pytest.importorskip("lm_eval")
    else:
        monkeypatch.setattr(choices, "find_spec", lambda _name: None)
    monkeypatch.setattr(choices, "QUESTIONS", 3)
    torch.manual_seed(0)
    config = preset("transformer", hidden_size=24, num_hidden_layers=2, num_attention_heads=2)
    config.max_position_embeddings = 1024
    model = ClearheadForCausalLM(config).eval()
    with torch.no_grad():
        prefill = choices.Prefill(model)
    for kind in choices.KINDS.values():
        questions = choices._questions(kind, config.vocab_size)
        ours = [one for row in choices._shared(model, prefill, questions) for one in row]
        rows = [row for question in questions for row in question]
        name, sides = choices._peer(model, rows)
        assert name == ("lm-eval's HFLM" if harness else "whole rows")
        for side in sides.values():
            found = [one[0] if isinstance(one, tuple) else one for one in side()]
            # The fallback answers in the order in which it reads.
            both = (found, ours) if harness else (sorted(found), sorted(ours))
            assert both[0] == pytest.approx(both[1], abs=1e-3, rel=1e-5)
