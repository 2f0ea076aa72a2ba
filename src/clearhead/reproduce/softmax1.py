"""Sinks and outlier activations, and what removes them: arXiv 2410.17174.

`paper` is the recipe of 130M (`recipes`). All arms have one rate there, as in the paper.

Ordinary text grows no sink within a day of two cores. The made text of arXiv 2410.13835, bigrams
that copy back now and then, grows one in minutes, so `sink` and `elimination` train on it. It is
seen in windows that open at a document's begin token: both ask for a diagnosis of such windows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.reproduce.recipes import RUNS
from clearhead.reproduce.study import COSMOPEDIA, WHOLE, Study, diagnose, experiment, quantize

PAPER = "arXiv 2410.17174"

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
REPAIRS: tuple[dict[str, Any], ...] = (
    {"train.optimizer": "orthoadam"},
    {"train.optimizer": "orthoadam", "train.rotation_share": "size"},
    {"normalizer": "softmax1"},
    {"normalizer": "softmax1", "train.optimizer": "orthoadam"},
)
RIVALS: tuple[dict[str, Any], ...] = (
    {"train.optimizer": "muon"},
    {"epilogue": "gate"},
    {"qk_norm": "rmsnorm"},
    {"normalizer": "softpick"},  # arXiv 2504.20966
    {"epilogue": "gate-headwise"},  # arXiv 2505.06708
    {"embedding_projection": True, "train.optimizer": "muon"},  # the whole of arXiv 2506.19697
)
C4 = ("hf:allenai/c4:en",)
RATES = (1.5e-3, 3e-3, 6e-3)  # on the made text
# Documents of four training lengths.
LONG = "synthetic:backcopy:documents=100,characters=3200"
TOKENS = {"tiny": 4_096_000, "small": 20_480_000}


@experiment(
    PAPER, "Do softmax-1 and OrthoAdam remove sinks and outlier activations?", published=True
)
def outliers(scale: str) -> Iterator[Study]:
    """Tables 2 and 3: AdamW and OrthoAdam × softmax and softmax-1, one gain a norm and no biases.

    OrthoAdam has the paper's rotation a parameter, and once one rotation for all axes of a size.
    """
    table, rates = TABLES[scale]
    text = DataConfig(data=table.data.data, limit=table.data.limit)
    length = table.train.sequence_length
    schemes = SCHEMES + FEWER + ROTATED
    bits = quantize(scheme=schemes, length=length, tokens=32_768, data=text)
    table = replace(table, questions={"bits": bits})
    for interventions in ({}, *REPAIRS, *RIVALS):
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


@experiment(PAPER, "What removes a sink from a text that grows one?")
def sink(scale: str) -> Iterator[Study]:
    """Softmax, and everything that gives a head with nothing to do something else to look at.

    The weight on no key is also read by position in documents of four training lengths.
    """
    table = _made(scale, "backcopy")
    longer = _documents(512, DataConfig(data=(LONG,), validation=WHOLE))
    # First, so that of what both measure the opening's counts.
    table = replace(table, questions={"longer": longer, **table.questions})
    yield table.arm("transformer", *RATES)
    # The interventions: a null key, a learned one, one with a place of its own, and a gate.
    for preset in ("softmax1", "sink", "key-bias", "gated", "xsa"):
        yield table.arm(preset, *RATES)


@experiment(PAPER, "Does ordinary text grow a sink, and does softmax-1 take it?")
def sink_text(scale: str) -> Iterator[Study]:
    """Softmax and softmax-1 in the setting of arXiv 2410.10781 that grows sinks.

    It found none after 50 M unique tokens, and four per cent after 500 M.
    """
    table = ORDINARY[scale]
    text = DataConfig(data=table.data.data, limit=table.data.limit)
    table = table.changed(
        label="sink on text",
        position="learned",
        measure_every=0.25,
        weight_decay=0.5,
        begin_windows=True,
        log_every=20,
        questions={"opening": _documents(64, text)},
    )
    yield table.arm("transformer", 2e-3)
    yield table.arm("softmax1", 2e-3)  # the intervention


@experiment(PAPER, "Which part of the model makes the sink?")
def elimination(scale: str) -> Iterator[Study]:
    """The baseline with one part of it changed at a time."""
    table = _made(scale, "elimination")
    yield table.arm("transformer", *RATES)
    changes: tuple[dict[str, Any], ...] = (  # the interventions
        {"position": "none"},
        {"position": "learned"},
        {"bias": True},
        {"norm": "layernorm"},
        {"norm": "rmsnorm-single"},
        {"mlp": "relu"},
        {"qk_norm": "rmsnorm"},
        {"normalizer": "softmax1"},
        {"train.weight_decay": 0.5},
        {"train.optimizer": "orthoadam"},
    )
    for one in changes:
        yield table.arm("transformer", *RATES, **one)


def _made(scale: str, label: str) -> Study:
    text = ("synthetic:backcopy:documents=20000",)
    # fmt: off
    return Study(label=label).changed(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=128,
        tokens=TOKENS[scale], sweep_tokens=TOKENS[scale] // 4, measure_every=0.1,
        sequence_length=128, batch_size=32, document_masks=True, log_every=20,
        data=text, vocabulary=512,
        # Tokenised by the model's own vocabulary.
        questions={"opening": _documents(64, DataConfig(data=text))})
    # fmt: on


def _documents(length: int, text: DataConfig) -> Any:
    """A diagnosis of the first tokens of documents."""
    return diagnose(length=length, at="documents", data=text)


# fmt: off
_NARROW = Study().changed(
    num_hidden_layers=6, hidden_size=128, num_attention_heads=4, evaluation_tokens=32_768,
    sequence_length=128, batch_size=8, vocabulary=2048)
# The tables of `outliers`, and the rates of their arms.
TABLES: Mapping[str, tuple[Study, tuple[float, ...]]] = {
    "tiny": (_NARROW.changed(
        **PLAIN, **(MEASURED | {"measure_every": 0.25}),
        tokens=2_000_000, sweep_tokens=409_600, log_every=20), (3e-3, 6e-3)),
    "small": (Study(presets=("gpt2",), size="small", **MEASURED).changed(
        **PLAIN, max_position_embeddings=1024, intermediate_size=2048,
        tokens=100_000_000, sweep_tokens=20_000_000, sequence_length=256, batch_size=128,
        compile="blocks", log_every=20,
        data=C4, vocabulary=16_384, limit=500_000_000), (5e-4, 1e-3, 2e-3)),
    "paper": (RUNS["gpt2-130m"].study(vary={}, **MEASURED), (1e-3,)),
}
ORDINARY = {
    "tiny": _NARROW.changed(tokens=307_200),
    "small": Study(size="small").changed(
        tokens=500_000_000, sequence_length=512, batch_size=64, compile="blocks",
        data=(COSMOPEDIA,), vocabulary=16_384, limit=2_500_000_000),
}
# fmt: on
