"""Sinks and outlier activations, and what removes them: arXiv 2410.17174, table 2.

AdamW and OrthoAdam × softmax and softmax-1, with one gain a norm and no biases as in the paper;
`clearhead compare` measures the first token's attention, kurtosis and the largest activations. The
paper's steps and batch are not known: `paper` takes GaLore's (arXiv 2403.03507) at 130M, which has
its data, length and sizes. All arms have one rate there, as in the paper.
"""

from dataclasses import replace

from clearhead.data import DataConfig
from clearhead.experiments.reproduce.study import Arm, Study

ORTHOADAM = {"train.optimizer": "orthoadam"}
SOFTMAX1 = {"normalizer": "softmax1"}
C4 = "hf:allenai/c4:en"
COMMON = ("--train.log-every", "20", "--measure-every", "0.1", "--lengths", "1", "4")
PLAIN = ("--set", "norm=rmsnorm-single", "bias=false")


def _arms(preset: str, *rates: str) -> tuple[Arm, ...]:
    return (
        Arm(preset, rates),
        Arm(preset, rates, ORTHOADAM),
        Arm(preset, rates, SOFTMAX1),
        Arm(preset, rates, SOFTMAX1 | ORTHOADAM),
    )


TINY = Study(
    name="outliers",
    arms=_arms("transformer", "3e-3", "6e-3", "1.2e-2"),
    tokens=2_000_000,
    sweep_tokens=600_000,
    options=(
        *(*COMMON, "--train.sequence-length", "128", "--train.batch-size", "8"),
        *(*PLAIN, "num_hidden_layers=6", "hidden_size=128", "num_attention_heads=4"),
    ),
    text=DataConfig(vocabulary=2048),
)
SMALL = replace(
    TINY,
    arms=_arms("gpt2", "5e-4", "1e-3", "2e-3"),
    tokens=100_000_000,
    sweep_tokens=20_000_000,
    options=(
        *(*COMMON, "--size", "small", "--train.sequence-length", "256"),
        *("--train.batch-size", "128", "--train.compile", "blocks"),
        *(*PLAIN, "max_position_embeddings=1024"),
    ),
    text=DataConfig(data=(C4,), vocabulary=16_384, limit=500_000_000),
)
PAPER = replace(
    SMALL,
    arms=_arms("gpt2", "1e-3"),
    tokens=2_621_440_000,
    options=(
        *(*COMMON, "--size", "small", "--train.sequence-length", "256"),
        *("--train.batch-size", "64", "--train.accumulation", "8", "--train.compile", "blocks"),
        *("--train.save-every", "500", *PLAIN, "max_position_embeddings=1024"),
        *("num_hidden_layers=12", "hidden_size=768", "num_attention_heads=12"),
        "intermediate_size=3072",
    ),
    text=DataConfig(data=(C4,), tokenizer="openai-community/gpt2", limit=15_000_000_000),
    seeds=(0,),
)
SCALES = {"tiny": (TINY,), "small": (SMALL,), "paper": (PAPER,)}
