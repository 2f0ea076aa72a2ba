"""Do the repairs add up? A fractional factorial over six of them, at equal tokens.

A sixteenth of the 64 compositions would do for the main effects alone; these 16 (resolution IV:
position = maps × normalizer × block, gate = normalizer × block × optimizer) keep them apart from
every pair, and most pairs from each other. Shaped blocks have 16 % fewer parameters, which is part
of what they claim; all other arms match.
"""

from collections.abc import Iterator
from itertools import product

from clearhead.data import DataConfig
from clearhead.experiments.configs import CompareConfig
from clearhead.experiments.sweep_configs import EvaluateConfig, EvaluateSettings
from clearhead.reproduce.trials import TRAINED, Table, Trial
from clearhead.train import TrainConfig

TOKENS = {"tiny": 1_500_000, "small": 50_000_000}
RATES = {"tiny": (3e-3,), "small": (1e-3, 2e-3)}
PASSKEY = "synthetic:passkey:landmark=1,documents=20000"


def together(scale: str) -> Iterator[Trial]:
    """Every repair with and without each of the others."""
    table = _table(scale)
    for maps, normalizer, block, optimizer in product((False, True), repeat=4):
        position, gate = maps ^ normalizer ^ block, normalizer ^ block ^ optimizer
        yield table.trial(
            "sas-p" if block else "transformer",
            *RATES[scale],
            **{  # the interventions
                "maps": "differential-v2" if maps else "single",
                "normalizer": "softmax1" if normalizer else "softmax",
                "position": "alibi" if position else "rope",
                "epilogue": "gate" if gate else "none",
                "train.optimizer": "orthoadam" if optimizer else "adamw",
            },
        )


def _table(scale: str) -> Table:
    length = {"tiny": 128, "small": 512}[scale]
    asked: EvaluateSettings = EvaluateConfig(
        models=(TRAINED,),
        tasks=("perplexity", "passkey"),
        lengths=(length, 4 * length),
        tokens=16_384,
    )
    config = CompareConfig(
        presets=("transformer",),
        size=scale,
        set={"max_position_embeddings": length},
        seeds=(0, 1, 2),
        lengths=(1, 4),
        train=TrainConfig(
            tokens=TOKENS[scale],
            sequence_length=length,
            batch_size=8 if scale == "tiny" else 32,
            document_masks=True,
            compile="none" if scale == "tiny" else "blocks",
            log_every=20,
        ),
        data=DataConfig(data=("python-stdlib", f"{PASSKEY}@0.3"), vocabulary=1024),
        label="together",
    )
    return Table(config=config, sweep_tokens=TOKENS[scale] // 5, questions={"text": asked})
