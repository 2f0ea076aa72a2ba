"""Bytes of a model's tensors by length of text, counted without storage, as records."""

from dataclasses import replace
from typing import Any

import torch

from clearhead.experiments.bill import training_memory
from clearhead.experiments.sweep_configs import PlanConfig
from clearhead.models import ClearheadConfig, ClearheadForCausalLM, plan, preset
from clearhead.models.planning import without_data
from clearhead.models.pretrained import cache_of
from clearhead.records.files import write_text
from clearhead.records.jsonl import encode
from clearhead.records.provenance import provenance
from clearhead.records.runs import Line
from clearhead.train.config import TrainConfig


def record_memory(config: PlanConfig, **_: object) -> list[Line]:
    """Count the bytes of each preset at each length; return their records, which are in
    `config.records` too.

    - `step_bytes`: of all tensors but weights, gradients and the optimizer's, when a training step
      of one text holds most (`training_memory`).
    - `cached_key_bytes`, `cached_bytes`: a token's keys, and its keys and values, at two bytes a
      number, as the model's own forward pass caches them.

    Raises:
        ClearheadError: for a model that is no preset, or that cannot be counted.
    """
    lines: list[Line] = []
    for name in config.models:
        positions = {"max_position_embeddings": max(config.lengths)}
        model = preset(name, config.size, **positions | config.set)
        train = TrainConfig(batch_size=1, precision="bf16")
        lines.append(
            {
                "kind": "run",
                "run": name,
                "arm": name,
                "preset": name,
                "seed": 0,
                "size": config.size,
                "model": model.to_diff_dict(),
                "parameters": plan(model).parameters,
                "train": {"tokens": 0, "batch_size": 1, "precision": train.precision},
                **provenance(torch.device("cpu")),
            }
        )
        for length in config.lengths:
            step = training_memory(model, replace(train, sequence_length=length))
            keys, values = _cached(model, length)
            counts = {
                "step_bytes": step["activations"],
                "cached_key_bytes": 2 * keys / length,
                "cached_bytes": 2 * (keys + values) / length,
            }
            of = {"kind": "measure", "run": name, "task": "memory", "length": length}
            lines += [{**of, "metric": metric, "value": one} for metric, one in counts.items()]
    assert config.records is not None
    write_text(config.records, "".join(map(encode, lines)))
    return lines


def _cached(config: ClearheadConfig, length: int) -> tuple[int, int]:
    """Numbers of keys and of values in the cache after one text of `length`."""
    with torch.device("meta"):
        model: Any = ClearheadForCausalLM(config)
    with without_data(), torch.no_grad():
        ids_BT = torch.zeros(1, length, dtype=torch.int64)
        layers = cache_of(model.to_empty(device="cpu").eval()(ids_BT, use_cache=True)).layers
    return sum(one.keys.numel() for one in layers), sum(one.values.numel() for one in layers)
