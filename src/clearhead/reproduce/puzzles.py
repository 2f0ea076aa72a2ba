"""The synthetic ladder (ours): puzzles of arXiv 2512.17351 by size and mechanism.

Models of 0.2 to 0.9 M parameters (`small`: 1 to 12 M) learn nothing but Depo, Brevo and Mano, a
third of the documents each. The page says at which width the baseline solves each.
"""

from collections.abc import Iterator

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


def ladder(scale: str) -> Iterator[Trial]:
    """The baseline at every width; at one of them also what changes how it attends or is built."""
    for width in WIDTHS[scale]:
        table = _table(scale, width)
        yield table.trial("transformer", *RATES[scale])
        if width == COMPARED[scale]:
            # The interventions.
            for preset in ("alibi", "forget", "differential-v2", "sas-p", "softmax1"):
                yield table.trial(preset, *RATES[scale])


def _table(scale: str, width: int) -> Table:
    asked: EvaluateSettings = EvaluateConfig(
        models=(TRAINED,),
        tasks=("depo", "brevo", "mano"),
        depo=DepoOptions(samples=200),
        brevo=BrevoOptions(samples=200),
        mano=ManoOptions(operations=(2, 3, 4), samples=200),
    )
    config = CompareConfig(
        presets=("transformer",),
        set={
            "hidden_size": width,
            "num_hidden_layers": 4,
            "num_attention_heads": width // HEAD,
            "max_position_embeddings": 128,
        },
        seeds=(0, 1, 2),
        lengths=(1,),
        train=TrainConfig(
            tokens=TOKENS[scale],
            sequence_length=128,
            batch_size=16 if scale == "tiny" else 128,
            document_masks=True,
            compile="none" if scale == "tiny" else "blocks",
            log_every=20,
        ),
        data=DataConfig(data=SOURCES, vocabulary=512),
        label=f"width {width}",
    )
    return Table(config=config, sweep_tokens=TOKENS[scale] // 5, questions={"puzzles": asked})
