"""Bytes by length of text: what is counted, and what is refused."""

import json

from clearhead.lab.bill import record_memory, training_memory
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.models import plan, preset
from clearhead.train import TrainConfig

SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300}


def test_cached_keys_of_coca_are_half_as_wide(tmp_path):
    path = tmp_path / "records.jsonl"
    names = ("transformer", "coca")
    lines = record_memory(PlanConfig(models=names, set=SHAPE, lengths=(16, 32), records=path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    assert lines[0]["train"]["precision"] == "bf16"  # as it is counted on every machine
    found = {(one["run"], one["metric"], one.get("length")): one["value"] for one in lines[1:]
             if one["kind"] == "measure"}  # fmt: skip
    for length in (16, 32):
        assert found["transformer", "cached_key_bytes", length] == 2 * 32
        assert found["coca", "cached_key_bytes", length] == 32
        for name in names:  # what runs, beside what the mechanism declares
            declared = plan(preset(name, **SHAPE)).cache_bytes
            assert found[name, "cached_bytes", length] == declared


def test_a_tensor_of_length_by_length_would_be_seen():
    """By the growth from one length to its double, which eager attention's scores make fourfold."""
    grown = {}
    for implementation in ("sdpa", "eager"):
        config = preset("coca", **SHAPE, max_position_embeddings=4096)
        config._attn_implementation = implementation
        short, long = (
            training_memory(config, TrainConfig(batch_size=1, sequence_length=length))
            for length in (2048, 4096)
        )
        grown[implementation] = long["activations"] / short["activations"]
    assert grown["sdpa"] <= 2 < 3 < grown["eager"]
