"""The synthetic ladder (ours): puzzles of arXiv 2512.17351 by size and mechanism.

Models of 0.2 to 0.9 M parameters (`small`: 1 to 12 M) learn nothing but Depo, Brevo and Mano, a
third of the documents each. The page says at which width the baseline solves each. The lowest rung,
one hop in a cycle of four, is an experiment of its own: small models get so far.
"""

from collections.abc import Iterator
from typing import Any

from clearhead.data import DataConfig
from clearhead.eval.options import BrevoOptions, DepoOptions, ManoOptions
from clearhead.experiments.configs import CompareConfig
from clearhead.experiments.sweep_configs import EvaluateConfig, EvaluateSettings
from clearhead.reproduce.trials import TRAINED, Table, Trial
from clearhead.train import TrainConfig

WIDTHS = {"tiny": (64, 128), "small": (128, 256, 384, 512)}
TOKENS = {"tiny": 2_000_000, "small": 100_000_000}
RATES = {"tiny": (2e-3,), "small": (1e-3, 2e-3)}
HEAD = 32
COMPARED = {"tiny": 128, "small": 384}  # the width at which claims compare the arms
SOURCES = tuple(f"synthetic:{task}:documents=100000" for task in ("depo", "brevo", "mano"))
ONE_HOP = ("synthetic:depo:documents=400000,vertices=4,hops=1,queries=6",)
ONE_HOP_TOKENS = 10_000_000


def ladder(scale: str) -> Iterator[Trial]:
    """The baseline at every width; at one of them also what changes how it attends or is built."""
    for width in WIDTHS[scale]:
        mixture = _mixture(scale, width)
        yield mixture.trial("transformer", *RATES[scale])
        if width == COMPARED[scale]:
            # The interventions.
            for preset in ("alibi", "forget", "differential-v2", "sas-p", "softmax1"):
                yield mixture.trial(preset, *RATES[scale])


def one_hop(_: str) -> Iterator[Trial]:
    """The lowest rung, learnt alone by the baseline; the same at every scale."""
    for width in WIDTHS["tiny"]:  # the intervention
        yield _one_hop(width).trial("transformer", 3e-3)


def _mixture(scale: str, width: int) -> Table:
    asked: EvaluateSettings = EvaluateConfig(
        models=(TRAINED,),
        tasks=("depo", "brevo", "mano"),
        depo=DepoOptions(samples=200),
        brevo=BrevoOptions(samples=200),
        mano=ManoOptions(operations=(2, 3, 4), samples=200),
    )
    config = _config(
        width,
        SOURCES,
        f"width {width}",
        tokens=TOKENS[scale],
        batch_size=16 if scale == "tiny" else 128,
        compile="none" if scale == "tiny" else "blocks",
    )
    return Table(config=config, sweep_tokens=TOKENS[scale] // 5, questions={"puzzles": asked})


def _one_hop(width: int) -> Table:
    asked: EvaluateSettings = EvaluateConfig(
        models=(TRAINED,), tasks=("depo",), depo=DepoOptions(vertices=4, hops=(1,), samples=200)
    )
    label = f"one hop, width {width}"
    config = _config(width, ONE_HOP, label, tokens=ONE_HOP_TOKENS, batch_size=32)
    return Table(config=config, questions={"one-hop": asked})


def _config(width: int, sources: tuple[str, ...], label: str, **train: Any) -> CompareConfig:
    """Models of this width on puzzles alone, in windows of one puzzle or several."""
    return CompareConfig(
        presets=("transformer",),
        set={
            "hidden_size": width,
            "num_hidden_layers": 4,
            "num_attention_heads": width // HEAD,
            "max_position_embeddings": 128,
        },
        seeds=(0, 1, 2),
        lengths=(1,),
        train=TrainConfig(sequence_length=128, document_masks=True, log_every=20, **train),
        data=DataConfig(data=sources, vocabulary=512),
        label=label,
    )
