"""Bytes that CoCA's tensors take, beside RoPE's: arXiv 2309.08646, section 3.

Nothing is trained and nothing drawn: the same command counts the same bytes, so there are no seeds.
"""

from collections.abc import Iterator

from clearhead.experiments.sweep_configs import PlanConfig
from clearhead.reproduce.study import Study

# Layers, width and heads.
SHAPES = {"tiny": ((2, 64, 2), (4, 128, 4)), "small": ((12, 512, 8), (24, 1024, 16))}
LENGTHS = {"tiny": (4096, 8192, 16_384), "small": (8192, 16_384, 32_768)}


def memory(scale: str) -> Iterator[Study]:
    """RoPE and the forms of CoCA, in two shapes at several lengths."""
    for layers, width, heads in SHAPES[scale]:
        table = Study(
            presets=("transformer",),
            set={"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads},
            seeds=(0,),
            label=f"{layers} layers, {width} wide",
            questions={"memory": PlanConfig(lengths=LENGTHS[scale])},
        )
        for preset in ("transformer", "coca", "coca-strict", "coca-slack"):  # the intervention
            yield table.arm(preset)
