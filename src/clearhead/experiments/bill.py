"""The bill of a training run before any weight exists: memory, FLOPs, time, money; and GPUs.

A GPU's dense bf16 rate, memory and bandwidth are of its data sheet; its price is to be changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clearhead.experiments.planned_memory import training_memory
from clearhead.models import Plan, plan
from clearhead.train.config import TrainConfig
from clearhead.train.parallel import dealt_among


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU.

    Attributes:
        flops: a second, dense bf16 with float32 sums.
        bandwidth: bytes a second.
        memory: bytes.
        price: US dollars an hour, about what clouds asked for one on demand in 2026.
    """

    flops: float
    bandwidth: float
    memory: float
    price: float


def _gpu(teraflops: float, terabytes: float, gigabytes: float, price: float) -> GPU:
    return GPU(
        flops=teraflops * 1e12, bandwidth=terabytes * 1e12, memory=gigabytes * 1e9, price=price
    )


GPUS = {
    "rtx4090": _gpu(165, 1.008, 24, 0.5),
    "l40s": _gpu(362, 0.864, 48, 1.2),
    "a100": _gpu(312, 2.039, 80, 1.8),
    "h100": _gpu(989, 3.35, 80, 3.0),
    "h200": _gpu(989, 4.8, 141, 3.8),
    "b200": _gpu(2250, 8.0, 180, 6.0),
    "mi300x": _gpu(1307, 5.3, 192, 3.0),
}


EFFICIENCY = 0.4  # of the dense bf16 rate, as 124M reached on an H200 (docs/scale.md)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and money of a run on a number of GPUs of a kind.

    Attributes:
        step: seconds of a step.
        total: seconds of the run.
        cost: US dollars.
        fits: whether the peak leaves a tenth of the GPU's memory free.
    """

    gpu: str
    number: int
    step: float
    total: float
    cost: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Costs of a training run.

    Attributes:
        counts: of the model, at the training length.
        memory: by number of GPUs, bytes on each by part (`training_memory`).
        step_flops: of a whole step: the forward pass, and twice that for the backward pass.
        steps: of the run.
        cache: bytes of the keys and values of one text of `context` tokens, in 16 bits.
    """

    counts: Plan
    memory: Mapping[int, Mapping[str, int]]
    step_flops: float
    steps: int
    context: int
    cache: float
    estimates: Sequence[Estimate]


def bill(
    config: Any,
    train: TrainConfig,
    *,
    gpus: Sequence[str],
    numbers: Sequence[int] = (1,),
    checkpointing: bool = False,
    efficiency: float = EFFICIENCY,
    price: float | None = None,
    context: int | None = None,
) -> Bill:
    """Make the bill of `train` on every kind and number of GPUs.

    A roofline: forward and backward pass take the longer of their FLOPs at `efficiency` of the
    GPU's dense bf16 rate, and of the traffic of their activations and weights; the optimizer takes
    that of its own state. The GPUs share the batches of a step, then the rows of a batch;
    communication between them is not counted.

    Args:
        numbers: of GPUs, with weights and optimizer sharded over them.
        price: of a GPU-hour; by default that of `GPUS`.
        context: tokens of the text whose keys and values are counted; by default the model's.

    Raises:
        ClearheadError: a number of GPUs that cannot share a step; and as `training_memory`.
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
    step_flops = 3.0 * counts.forward_flops * train.tokens_per_step
    estimates = []
    for name in gpus:
        for number in numbers:
            gpu, parts = GPUS[name], memory[number]
            passes = train.accumulation // dealt[number]
            work = step_flops / passes / number * (4 / 3 if checkpointing else 1)
            compute = work / (gpu.flops * efficiency)
            # Activations are written and read once; weights are read by both passes, in 16 bits.
            traffic = (2 * parts["activations"] + 4 * counts.parameters) / gpu.bandwidth
            state = 2 * (parts["optimizer"] + 8 * counts.parameters / number)
            step = passes * max(compute, traffic) + state / gpu.bandwidth
            total = train.tokens / train.tokens_per_step * step
            hourly = gpu.price if price is None else price
            estimates.append(
                Estimate(
                    gpu=name,
                    number=number,
                    step=step,
                    total=total,
                    cost=number * total / 3600 * hourly,
                    fits=parts["peak"] < 0.9 * gpu.memory,
                )
            )
    return Bill(
        counts=counts,
        memory=memory,
        step_flops=step_flops,
        steps=train.steps,
        context=read.length,
        cache=read.cache_bytes * read.length,
        estimates=estimates,
    )
