"""Memory, FLOPs and time of a training run, counted before any weight exists."""

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from rich.filesize import decimal

from clearhead import ops
from clearhead.errors import ClearheadError, choose, first_line
from clearhead.lab.runs import new_model
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.models import BASELINE, PRESETS, ClearheadForMaskedLM, plan, preset, presets
from clearhead.models.base_model import cache_of
from clearhead.models.loading import load_config, resolved
from clearhead.models.planning import counterpart, without_data
from clearhead.optim import build_optimizer
from clearhead.progress import in_words
from clearhead.records.files import write_text
from clearhead.records.jsonl import encode
from clearhead.records.provenance import provenance
from clearhead.records.runs import Line
from clearhead.settings.data import SHARE
from clearhead.settings.train import TrainConfig
from clearhead.terminal import console, show
from clearhead.train.parallel import dealt_among

EFFICIENCY = 0.4  # of the dense bf16 rate, as 124M reached on an H200 (docs/scale.md)
# A part of the bill, and the kinds of memory that PyTorch's tracker tells apart.
_PARTS = {
    "weights": ("PARAM", "BUFFER"),
    "gradients": ("GRAD",),
    "optimizer": ("OPT",),
    "activations": ("ACT", "TEMP", "OTH", "INP"),
}
# FLOPs a second, dense bf16 with float32 sums, and bytes of memory, by data sheet; of this machine
# 16 float32 multiply-adds a cycle and core at 3 GHz.
DEVICES = {
    "cpu": (
        1e11 * (os.cpu_count() or 1),
        float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    ),
    "rtx4090": (165e12, 24e9),
    "l40s": (362e12, 48e9),
    "a100": (312e12, 80e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "b200": (2250e12, 180e9),
    "mi300x": (1307e12, 192e9),
}


def bill(
    config: Any, train: TrainConfig, *, devices: Sequence[str], numbers: Sequence[int] = (1,)
) -> tuple[Mapping[int, Mapping[str, int]], list[tuple[str, int, float, bool]]]:
    """Bytes on each device by part, by number of devices (`training_memory`); and for each kind and
    number the seconds (FLOPs, a third more where the forward pass is computed twice, at
    `EFFICIENCY`), and True where a tenth of each device's memory stays free."""
    flops = 3 * plan(config, length=train.sequence_length).forward_flops * train.tokens
    taken = flops * (4 / 3 if train.checkpointing == "blocks" else 1)
    memory = dict[int, Mapping[str, int]]()
    for number in numbers:
        step = replace(train, batch_size=train.batch_size * dealt_among(train, number) // number)
        memory[number] = training_memory(config, step, gpus=number)
    estimates = []
    for name, number in itertools.product(devices, numbers):
        if name != "cpu" or number == 1:
            rate, room = DEVICES[name]
            fits = memory[number]["peak"] < 0.9 * room
            estimates.append((name, number, taken / (number * EFFICIENCY * rate), fits))
    return memory, estimates


def print_overview(size: str, changes: Mapping[str, Any]) -> None:
    """A table of every preset at one size, and what each is."""
    rows = dict[str, dict[str, str]]()
    baseline = plan(preset(BASELINE, size, **changes)).parameters
    for name in presets():
        try:
            counts = plan(preset(name, size, **changes))
        except ClearheadError as error:
            console().print(str(error), style="dim")
            continue
        rows[name] = {
            "parameters": f"{counts.parameters:,}",
            "to baseline": f"{100 * (counts.parameters / baseline - 1):+.2f} %",
            "MFLOPs a token": f"{counts.forward_flops / 1e6:,.1f}",
            "cache bytes a token": f"{counts.cache_bytes:,.0f}",
        }
    show(f"presets at size {size}{', changed' * bool(changes)}")
    show(DataFrame(rows).T.to_string())
    for name, summary in presets().items():
        console().print(f"[bold]{name}[/bold]: {summary}")


def named_configs(command: PlanConfig, train: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Name and configuration of each model; of a preset with room for the training's windows."""
    for name in command.models:
        if name in PRESETS or not (Path(name).exists() or "/" in name):
            base = preset(choose("preset or folder", name, PRESETS), command.size, **command.set)
            room = max(base.max_position_embeddings, train.sequence_length)
            keys = ", ".join(f"{key}={value}" for key, value in command.set.items())
            wide = {"max_position_embeddings": room} | command.set
            yield f"{name}, {keys or f'size {command.size}'}", preset(name, command.size, **wide)
        elif command.set or command.size != PlanConfig.size:
            raise ClearheadError(f"{name} is no preset: leave --size and --set out")
        else:
            yield name, load_config(resolved(name), trust_remote_code=command.trust_remote_code)


def print_bill(config: Any, command: Any) -> None:
    """Print the `bill` that the options of `clearhead plan` ask for."""
    train: TrainConfig = command.train
    memory, estimates = bill(config, train, devices=command.gpu, numbers=command.gpus)
    counts, read = plan(config, length=train.sequence_length), plan(config, length=command.context)
    forward, total = counts.forward_flops, 3 * counts.forward_flops * train.tokens
    step = f"{train.accumulation} x {train.batch_size} x {train.sequence_length}"
    cache = decimal(int(read.cache_bytes * read.length))
    show(
        f"  {counts.parameters:,} parameters, "
        f"{counts.non_embedding_parameters:,} without embeddings\n"
        f"  {train.tokens:,} tokens in {train.steps:,} steps of {step}\n"
        f"  {forward / 1e6:,.1f} MFLOPs a token forward; {total:.3g} FLOPs, backward twice that\n"
        f"  keys and values of {read.length:,} tokens: {cache}\n"
    )
    how = f"{train.optimizer}, {'fp32' if train.precision == 'fp32' else 'bf16'}"
    how += ", checkpointing" * (train.checkpointing == "blocks")
    show(f"  memory of a device at the peak, by number of devices ({how})")
    show(DataFrame(memory).map(decimal).to_string())
    show(f"\n  time at {100 * EFFICIENCY:g} % of the dense bf16 rate")
    times = {
        f"{number} x {name}": {
            "tokens/s": f"{train.tokens / time:,.0f}",
            "run": in_words(time),
            "fits": "yes" if fits else "no",
        }
        for name, number, time, fits in estimates
    }
    show(DataFrame(times).T.to_string() + "\n")


def training_memory(config: Any, train: TrainConfig, *, gpus: int = 1) -> Mapping[str, int]:
    """Bytes of tensors on one of several GPUs at the peak of an eager training step, by part;
    "auto" counts as bf16, and a layer gathered whole while it runs is not counted."""
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
        reason = f"without data: {first_line(error)}"
        raise ClearheadError(f"{train.optimizer} cannot be planned {reason}") from error
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
    """Records of each preset at each length, also written: `step_bytes`, the activations of a step
    on one text; a token's `cached_key_bytes` and `cached_bytes`, at two bytes a number."""
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
