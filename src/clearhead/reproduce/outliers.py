"""Sinks and outlier activations, and what removes them: arXiv 2410.17174, tables 2 and 3.

`paper` is the recipe of 130M (`recipes`). All arms have one rate there, as in the paper.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.experiments.sweep_configs import QuantizeConfig
from clearhead.reproduce.recipes import RUNS
from clearhead.reproduce.study import TRAINED, Study

PLAIN: dict[str, Any] = {"norm": "rmsnorm-single", "bias": False}
MEASURED: dict[str, Any] = {"label": "outliers", "lengths": (1, 4), "measure_every": 0.1}
SCHEMES = ("w8a8-coarse", "w8a8-moderate", "w8a8-fine", "w4-channel", "mxfp4")
FEWER = ("w6a6-coarse", "w4a4-coarse")
# A rotation after training (QuaRot's) is the rival of one in the optimizer.
ROTATED = (
    *("hadamard-w8a8-coarse", "hadamard-w4-channel", "hadamard-mxfp4"),
    *(f"hadamard-{one}" for one in FEWER),
)
MUON = (1e-2, 2e-2)
OTHERS = {"sgd": (0.1, 0.3, 1.0), "rmsprop": (3e-4, 1e-3, 3e-3), "adafactor": (1e-2, 3e-2, 9e-2)}
C4 = ("hf:allenai/c4:en",)


def outliers(scale: str) -> Iterator[Study]:
    """AdamW and OrthoAdam × softmax and softmax-1, with one gain a norm and no biases.

    OrthoAdam has the paper's rotation a parameter, and once one rotation for all axes of a size.
    Their rivals follow, and optimizers with and without a step of its own for every number.

    `clearhead compare` measures the first token's attention, kurtosis and largest activations,
    `clearhead quantize` the cost of few bits (table 3).
    """
    table, rates = {"tiny": _tiny, "small": _small, "paper": _paper}[scale]()
    text = DataConfig(data=table.data.data, limit=table.data.limit)
    length = table.train.sequence_length
    bits = QuantizeConfig(
        models=(TRAINED,), scheme=SCHEMES + FEWER + ROTATED, length=length, tokens=32_768, data=text
    )
    table = replace(table, questions={"bits": bits})
    for interventions in (
        {},
        {"train.optimizer": "orthoadam"},
        {"train.optimizer": "orthoadam", "train.rotation_share": "size"},
        {"normalizer": "softmax1"},
        {"normalizer": "softmax1", "train.optimizer": "orthoadam"},
        {"train.optimizer": "muon"},  # the rivals: 2506.19697's optimizer, a gate, normed queries
        {"epilogue": "gate"},
        {"qk_norm": "rmsnorm"},
    ):
        muon = interventions.get("train.optimizer") == "muon" and len(rates) > 1
        yield _arm(table, *(MUON if muon else rates), **interventions)
    if scale != "paper":  # the ablation of optimizers, for which the paper gives no rates
        for name, swept in OTHERS.items():
            yield _arm(table, *swept, **{"train.optimizer": name})


def _arm(table: Study, *rates: float, **changes: Any) -> Study:
    """An arm whose name begins with `transformer` at every scale, so that claims find it."""
    (baseline,) = table.presets
    one = table.arm(baseline, *rates, **changes)
    if baseline == "transformer":
        return one
    return replace(one, called=one.name.replace(baseline, "transformer", 1))


def _tiny() -> tuple[Study, tuple[float, ...]]:
    study = Study(**(MEASURED | {"measure_every": 0.25})).changed(
        **PLAIN,
        num_hidden_layers=6,
        hidden_size=128,
        num_attention_heads=4,
        evaluation_tokens=32_768,
        tokens=2_000_000,
        sweep_tokens=409_600,
        sequence_length=128,
        batch_size=8,
        log_every=20,
        vocabulary=2048,
    )
    return study, (3e-3, 6e-3)


def _small() -> tuple[Study, tuple[float, ...]]:
    study = Study(presets=("gpt2",), size="small", **MEASURED).changed(
        **PLAIN,
        max_position_embeddings=1024,
        intermediate_size=2048,
        tokens=100_000_000,
        sweep_tokens=20_000_000,
        sequence_length=256,
        batch_size=128,
        compile="blocks",
        log_every=20,
        data=C4,
        vocabulary=16_384,
        limit=500_000_000,
    )
    return study, (5e-4, 1e-3, 2e-3)


def _paper() -> tuple[Study, tuple[float, ...]]:
    return RUNS["gpt2-130m"].study(vary={}, **MEASURED), (1e-3,)
