"""The bill of a training run before any weight exists: memory, FLOPs, time; and devices.

A GPU's dense bf16 rate and memory are of its data sheet, a CPU's are this machine's cores and RAM.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from clearhead.experiments.planned_memory import training_memory
from clearhead.models import Plan, plan
from clearhead.train.config import TrainConfig
from clearhead.train.parallel import dealt_among

EFFICIENCY = 0.4  # of the dense bf16 rate, as 124M reached on an H200 (docs/scale.md)
CORE = 1e11  # FLOPs a second: 16 float32 multiply-adds a cycle at 3 GHz


class Device(NamedTuple):
    """A device's FLOPs a second, dense bf16 with float32 sums, and its bytes of memory."""

    flops: float
    memory: float


_RAM = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
DEVICES = {
    "cpu": Device(CORE * (os.cpu_count() or 1), _RAM),
    "rtx4090": Device(165e12, 24e9),
    "l40s": Device(362e12, 48e9),
    "a100": Device(312e12, 80e9),
    "h100": Device(989e12, 80e9),
    "h200": Device(989e12, 141e9),
    "b200": Device(2250e12, 180e9),
    "mi300x": Device(1307e12, 192e9),
}


class Estimate(NamedTuple):
    """Seconds of a step and of the whole run on a number of devices, and whether the peak of memory
    leaves a tenth of each device's free."""

    device: str
    number: int
    step: float
    total: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Costs of a training run.

    Attributes:
        counts: of the model, at the training length.
        memory: by number of devices, bytes on each by part (`training_memory`).
        flops: of the whole run: the forward passes, and twice that for the backward passes.
        context, cache: tokens of a text, and bytes of its keys and values in 16 bits.
    """

    counts: Plan
    memory: Mapping[int, Mapping[str, int]]
    flops: float
    context: int
    cache: float
    estimates: Sequence[Estimate]


def bill(
    config: Any,
    train: TrainConfig,
    *,
    devices: Sequence[str],
    numbers: Sequence[int] = (1,),
    checkpointing: bool = False,
    efficiency: float = EFFICIENCY,
    context: int | None = None,
) -> Bill:
    """Make the bill of `train`: a step takes its FLOPs over `efficiency` of the devices' rate.

    The devices share the batches of a step, then the rows of a batch. Checkpointing computes the
    forward pass twice.

    Args:
        numbers: of devices, with weights and optimizer sharded over them; a CPU is one.
        context: tokens of the text whose keys and values are counted; by default the model's.

    Raises:
        ClearheadError: a number of devices that cannot share a step; and as `training_memory`.
    """
    dealt = {number: dealt_among(train, number) for number in numbers}
    counts = plan(config, length=train.sequence_length)
    read = plan(config, length=context)
    memory = {
        number: training_memory(
            config,
            replace(train, batch_size=train.batch_size * among // number),
            checkpointing=checkpointing,
            gpus=number,
        )
        for number, among in dealt.items()
    }
    flops, steps = 3.0 * counts.forward_flops * train.tokens, train.tokens / train.tokens_per_step
    estimates = []
    for name in devices:
        for number in numbers if name != "cpu" else {1}.intersection(numbers):
            rate = number * efficiency * DEVICES[name].flops
            total = flops * (4 / 3 if checkpointing else 1) / rate
            fits = memory[number]["peak"] < 0.9 * DEVICES[name].memory
            estimates.append(Estimate(name, number, total / steps, total, fits))
    return Bill(
        counts=counts,
        memory=memory,
        flops=flops,
        context=read.length,
        cache=read.cache_bytes * read.length,
        estimates=estimates,
    )
