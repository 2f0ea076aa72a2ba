"""Do the repairs add up? A fractional factorial over six of them, at equal tokens.

A sixteenth of the 64 compositions would do for the main effects alone; these 16 (resolution IV:
position = maps × normalizer × block, gate = normalizer × block × optimizer) keep them apart from
every pair, and most pairs from each other. Shaped blocks have 16 % fewer parameters, which is part
of what they claim; all other arms match.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from clearhead.experiments.sweep_configs import EvaluateConfig, EvaluateSettings, QuantizeConfig
from clearhead.reproduce.study import TRAINED, Study

CONFIRMED_ON = (3, 4, 5)  # seeds that did not choose the composition
TOKENS = {"tiny": 256_000, "small": 50_000_000}
SWEEPS = {"tiny": 102_400, "small": 10_000_000}
RATES = {"tiny": (3e-3, 6e-3), "small": (1e-3, 2e-3)}
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 4},
    "small": {},
}
SCHEMES = ("w8a8-coarse", "w4-channel")
PASSKEY = "synthetic:passkey:landmark=1,documents=20000"


def together(scale: str) -> Iterator[Study]:
    """Every repair with and without each of the others."""
    table = _table(scale)
    for maps, normalizer, block, optimizer in product((False, True), repeat=4):
        position, gate = maps ^ normalizer ^ block, normalizer ^ block ^ optimizer
        yield table.arm(
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


def composition(scale: str) -> Iterator[Study]:
    """The composition that `together` chose and the baseline, under seeds that did not choose."""
    table = _table(scale).changed(seeds=CONFIRMED_ON, label="composition")
    for preset in ("transformer", "clearhead"):  # the intervention
        yield table.arm(preset, *RATES[scale])


def _table(scale: str) -> Study:
    tiny, length = scale == "tiny", {"tiny": 128, "small": 512}[scale]
    read: dict[str, Any] = {"lengths": (length, 4 * length), "tokens": 16_384}
    asked: EvaluateSettings = EvaluateConfig(
        models=(TRAINED,),
        # Passkeys take more tokens to learn than `tiny` has.
        tasks=("hits",) if tiny else ("hits", "passkey"),
        **read,
    )
    bits = QuantizeConfig(models=(TRAINED,), scheme=SCHEMES, length=length, tokens=16_384)
    return Study(label="together", size=scale, questions={"text": asked, "bits": bits}).changed(
        **SHAPES[scale],
        max_position_embeddings=length,
        lengths=(1, 4),
        evaluation_tokens=32_768 if tiny else 65_536,
        tokens=TOKENS[scale],
        sweep_tokens=SWEEPS[scale],
        sequence_length=length,
        batch_size=8 if tiny else 32,
        document_masks=True,
        compile="none" if tiny else "blocks",
        log_every=20,
        data=("python-stdlib",) if tiny else ("python-stdlib", f"{PASSKEY}@0.3"),
        vocabulary=1024,
    )
