"""Speed as a ratio: every figure is measured beside a named peer, in turns, in one process.

Machines are shared and noisy, so seconds alone say little: the sides take turns, each side's
figure is the median over rounds, and what counts is the quotient.
"""

from collections.abc import Callable, Iterator, Mapping

from clearhead.experiments.bench import (
    attention,
    blocks,
    demo,
    diagnosis,
    encoders,
    evaluation,
    optimizer,
    quantize,
    training,
)
from clearhead.experiments.bench.race import Ratio

BENCHES: Mapping[str, Callable[[int], Iterator[Ratio]]] = {
    "training-step": training.training_step,
    "kernel": attention.kernel,
    "attention": attention.layers,
    "memory": attention.memory,
    "blocks": blocks.blocks,
    "encoders": encoders.encoders,
    "orthoadam": optimizer.orthoadam,
    "diagnose": diagnosis.diagnosis,
    "quantize": quantize.quantize,
    "passkey": evaluation.passkey,
    "sliding": evaluation.sliding_windows,
    "demo": demo.demo,
}

__all__ = ["BENCHES", "Ratio"]
