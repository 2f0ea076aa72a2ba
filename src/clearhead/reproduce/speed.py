"""Throughput of training on this machine: arXiv 2410.05258, table 7; arXiv 2311.01906, table 1.

Every seed is a round: one short run of each arm, by turns, so that what else the machine does
meets all arms alike. The claims compare ratios. They hold for the device that the record names.
"""

from collections.abc import Iterator

from clearhead.reproduce.study import Study
from clearhead.train import TrainConfig

ROUNDS = 6
STEPS = 24
SHAPES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
    "small": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16},
}


def speed(scale: str) -> Iterator[Study]:
    """The baseline, differential maps and simplified blocks."""
    rows, length = {"tiny": (4, 256), "small": (16, 2048)}[scale]
    table = Study(
        presets=("transformer",),
        size=scale,
        set={**SHAPES[scale], "max_position_embeddings": length},
        seeds=tuple(range(ROUNDS)),
        lengths=(),  # models of so few steps say nothing about quality
        train=TrainConfig(
            tokens=STEPS * rows * length,
            sequence_length=length,
            batch_size=rows,
            compile="none" if scale == "tiny" else "blocks",
            log_every=4,
        ),
        label="speed",
    )
    yield table.arm("transformer", 1e-3)
    for preset in ("differential", "differential-v2", "sas", "sas-p", "clearhead"):
        yield table.arm(preset, 1e-3)  # the intervention
