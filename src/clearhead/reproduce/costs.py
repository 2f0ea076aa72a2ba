"""Costs on this machine: throughput of training, and bytes of tensors.

arXiv 2410.05258, table 7, and arXiv 2311.01906, table 1: every seed is a round: one short run of
each arm, by turns, so that what else the machine does meets all arms alike. The claims compare
ratios. They hold for the device that the record names.

arXiv 2309.08646, section 3, bytes that CoCA's tensors take beside RoPE's: nothing is trained and
nothing drawn: the same command counts the same bytes, so there are no seeds.
"""

from collections.abc import Iterator
from typing import Any

from clearhead.experiments.sweep_configs import PlanConfig
from clearhead.reproduce.study import Study

ROUNDS = 6
STEPS = 24
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
    "small": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16},
}
# Layers, width and heads.
DEPTHS = {"tiny": ((2, 64, 2), (4, 128, 4)), "small": ((12, 512, 8), (24, 1024, 16))}
LENGTHS = {"tiny": (4096, 8192, 16_384), "small": (8192, 16_384, 32_768)}


def speed(scale: str) -> Iterator[Study]:
    """The baseline, differential maps and simplified blocks."""
    rows, length = {"tiny": (4, 256), "small": (16, 2048)}[scale]
    table = Study(label="speed", size=scale, seeds=tuple(range(ROUNDS))).changed(
        **SHAPES[scale],
        max_position_embeddings=length,
        lengths=(),  # models of so few steps say nothing about quality
        tokens=STEPS * rows * length,
        sequence_length=length,
        batch_size=rows,
        compile="none" if scale == "tiny" else "blocks",
        log_every=4,
    )
    yield table.arm("transformer", 1e-3)
    for preset in ("differential", "differential-v2", "sas", "sas-p", "clearhead"):
        yield table.arm(preset, 1e-3)  # the intervention


def memory(scale: str) -> Iterator[Study]:
    """RoPE and the forms of CoCA, in two shapes at several lengths."""
    for layers, width, heads in DEPTHS[scale]:
        table = Study(label=f"{layers} layers, {width} wide", seeds=(0,)).changed(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            questions={"memory": PlanConfig(lengths=LENGTHS[scale])},
        )
        for preset in ("transformer", "coca", "coca-strict", "coca-slack"):  # the intervention
            yield table.arm(preset)
