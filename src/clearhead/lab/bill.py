"""Memory, FLOPs and time of a training run, counted before any weight exists."""

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from clearhead import ops
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.lab.run_setup import new_model
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.models import ClearheadForMaskedLM, Plan, plan, preset
from clearhead.models.base_model import cache_of
from clearhead.models.planning import counterpart, without_data
from clearhead.optim import build_optimizer
from clearhead.records.files import write_text
from clearhead.records.jsonl import encode
from clearhead.records.provenance import provenance
from clearhead.records.runs import Line
from clearhead.train.config import TrainConfig
from clearhead.train.parallel import dealt_among

EFFICIENCY = 0.4  # of the dense bf16 rate, as 124M reached on an H200 (docs/scale.md)
CORE = 1e11  # FLOPs a second: 16 float32 multiply-adds a cycle at 3 GHz
# A part of the bill, and the kinds of memory that PyTorch's tracker tells apart.
_PARTS = {
    "weights": ("PARAM", "BUFFER"),
    "gradients": ("GRAD",),
    "optimizer": ("OPT",),
    "activations": ("ACT", "TEMP", "OTH", "INP"),
}
# FLOPs a second, dense bf16 with float32 sums, and bytes of memory, by data sheet.
GPUS = {
    "rtx4090": (165e12, 24e9),
    "l40s": (362e12, 48e9),
    "a100": (312e12, 80e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "b200": (2250e12, 180e9),
    "mi300x": (1307e12, 192e9),
}


class Estimate(NamedTuple):
    """Seconds of a step and of the run on a number of devices; the peak of memory `fits` where a
    tenth of each device's stays free."""

    device: str
    number: int
    step: float
    total: float
    fits: bool


class Bill(NamedTuple):
    """Costs of a training run: of the model at the training length; bytes on each device by part
    (`training_memory`), by number of devices; FLOPs of all forward and backward passes; times."""

    counts: Plan
    memory: Mapping[int, Mapping[str, int]]
    flops: float
    estimates: Sequence[Estimate]


def device(name: str) -> tuple[float, float]:
    """FLOPs a second and bytes of memory of one of `GPUS`, or of this machine's "cpu"."""
    if name != "cpu":
        return GPUS[name]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CORE * (os.cpu_count() or 1), float(memory)


def bill(
    config: Any, train: TrainConfig, *, devices: Sequence[str], numbers: Sequence[int] = (1,)
) -> Bill:
    """Estimate the costs of `train`: a step's time is its FLOPs over `EFFICIENCY` of the devices'
    rate, and a third more where checkpointing computes the forward pass twice.

    Args:
        numbers: numbers of devices over which weights and optimizer are sharded; 1 for a CPU.

    Raises:
        ClearheadError: a number of devices that cannot share a step; and as `training_memory`.
    """
    counts = plan(config, length=train.sequence_length)
    memory = dict[int, Mapping[str, int]]()
    for number in numbers:
        step = replace(train, batch_size=train.batch_size * dealt_among(train, number) // number)
        memory[number] = training_memory(config, step, gpus=number)
    flops = 3.0 * counts.forward_flops * train.tokens
    taken = flops * (4 / 3 if train.checkpointing == "blocks" else 1)
    estimates = []
    for name, number in itertools.product(devices, numbers):
        if name != "cpu" or number == 1:
            rate, room = device(name)
            total = taken / (number * EFFICIENCY * rate)
            step_seconds = total * train.tokens_per_step / train.tokens
            fits = memory[number]["peak"] < 0.9 * room
            estimates.append(Estimate(name, number, step_seconds, total, fits))
    return Bill(counts, memory, flops, estimates)


def training_memory(config: Any, train: TrainConfig, *, gpus: int = 1) -> Mapping[str, int]:
    """Bytes of tensors on one GPU at the peak of a training step, by part.

    The step is eager, on the CPU's kernels; `precision` "auto" counts as bf16. Each of several GPUs
    holds its share of weights, gradients and optimizer; a layer gathered whole while it runs is not
    counted. `config` is as in `plan`.

    Raises:
        ClearheadError: an optimizer that reads its tensors' values, such as Adafactor.
    """
    config = counterpart(config)
    with torch.device("meta"):
        model: Any = new_model(config).float()
    if train.checkpointing == "blocks":
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # 5.17 has no other name
    try:
        with without_data():
            held = _peak(model, train)
    except RuntimeError as error:  # also what depends on the data
        reason = str(error).split("\n", 1)[0]
        raise ClearheadError(
            f"the memory of a step with {train.optimizer} cannot be planned: its step fails on "
            f"tensors without data ({reason}); measure a step instead"
        ) from error
    parts = {
        part: sum(held.get(kind, 0) for kind in kinds) // (1 if part == "activations" else gpus)
        for part, kinds in _PARTS.items()
    }
    return parts | {"peak": sum(parts.values())}


def _peak(model: Any, train: TrainConfig) -> dict[str, int]:
    """Bytes by kind at the peak of a second step, by which the optimizer has its state."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model.to_empty(device="cpu")
    model.tie_weights()
    model.train()
    optimizer = build_optimizer(model, train)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    ids_BT = torch.zeros(train.batch_size, train.sequence_length, dtype=torch.int64)
    batch = {"input_ids": ids_BT}
    if train.document_masks:
        batch |= {"document_ids": ids_BT.clone(), "position_ids": ids_BT.clone()}
    labels_BT = ids_BT.clone()
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=train.precision != "fp32"):
            if isinstance(model, ClearheadForMaskedLM):
                # As its forward, with a fixed number of hidden tokens: fake labels hold no values.
                x_BTC = model.model(**batch).last_hidden_state
                hidden_N = torch.arange(round(SHARE * labels_BT.numel()))
                x_NC = x_BTC.flatten(0, 1).index_select(0, hidden_N)
                labels_N = labels_BT.flatten().index_select(0, hidden_N)
                loss = ops.linear_cross_entropy(x_NC, model.lm_head.weight, labels_N)
            else:
                loss = model(**batch, labels=labels_BT, use_cache=False).loss
        loss.backward()
        if train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(kind, "name", kind)): size for kind, size in peak.items()}


def record_memory(config: PlanConfig, **_: object) -> list[Line]:
    """Count the bytes of each preset at each length; write and return the records.

    - `step_bytes`: all tensors but weights, gradients and the optimizer's, at the peak of a
      training step of one text (`training_memory`).
    - `cached_key_bytes`, `cached_bytes`: a token's keys, and its keys and values, at two bytes a
      number, as the model's own forward pass caches them.

    Raises:
        ClearheadError: for a model that is no preset, or that cannot be counted.
    """
    lines: list[Line] = []
    train = TrainConfig(batch_size=1, precision="bf16")
    for name in config.models:
        positions = {"max_position_embeddings": max(config.lengths)}
        model = preset(name, config.size, **positions | config.set)
        head = {"kind": "run", **dict.fromkeys(("run", "arm", "preset"), name), "seed": 0}
        head |= {"size": config.size, "model": model.to_diff_dict()}
        head |= {"parameters": plan(model).parameters, **provenance(torch.device("cpu"))}
        head["train"] = {"tokens": 0, "batch_size": 1, "precision": train.precision}
        lines.append(head)
        for length in config.lengths:
            step = training_memory(model, replace(train, sequence_length=length))
            with torch.device("meta"):
                fresh, ids_BT = new_model(model).eval(), torch.zeros(1, length, dtype=torch.int64)
                with torch.no_grad():
                    layers = cache_of(fresh(ids_BT, use_cache=True)).layers
            keys, values = (
                2 * sum(getattr(one, part).numel() for one in layers) / length
                for part in ("keys", "values")
            )
            counts = {"step_bytes": step["activations"]}
            counts |= {"cached_key_bytes": keys, "cached_bytes": keys + values}
            of = {"kind": "measure", "run": name, "task": "memory", "length": length}
            lines += [{**of, "metric": metric, "value": one} for metric, one in counts.items()]
    assert config.records is not None
    write_text(config.records, "".join(map(encode, lines)))
    return lines
