"""First-token sinks: arXiv 2410.17174, its elimination study, and the rivals of softmax-1.

Ordinary text grows no sink within a day of two cores. The made text of arXiv 2410.13835 (bigrams,
some of which copy back) grows one in minutes, so `sink` and `elimination` train on it. It is seen
in windows that open at a document's begin token, so both ask for a diagnosis of such windows.
"""

from collections.abc import Iterator
from dataclasses import replace

from clearhead.data import DataConfig
from clearhead.experiments.sweep_configs import DiagnoseConfig
from clearhead.reproduce.study import COSMOPEDIA, TRAINED, WHOLE, Study

RATES = (1.5e-3, 3e-3, 6e-3)
# Documents of four training lengths.
LONG = "synthetic:backcopy:documents=100,characters=3200"
TOKENS = {"tiny": 4_096_000, "small": 20_480_000}


def sink(scale: str) -> Iterator[Study]:
    """Softmax, and everything that gives a head with nothing to do something else to look at.

    The weight on no key is also read by position in documents of four training lengths.
    """
    table = _table(scale, "backcopy")
    longer = _documents(512, DataConfig(data=(LONG,), validation=WHOLE))
    # First, so that of what both measure the opening's counts.
    table = replace(table, questions={"longer": longer, **table.questions})
    yield table.arm("transformer", *RATES)
    # The interventions: a null key, a learned one, one with a place of its own, and a gate.
    for preset in ("softmax1", "sink", "key-bias", "gated", "xsa"):
        yield table.arm(preset, *RATES)


def text(scale: str) -> Iterator[Study]:
    """Softmax and softmax-1 on ordinary text, in the setting of arXiv 2410.10781 that grows sinks.

    It found none after 50 M unique tokens, and four per cent after 500 M.
    """
    if scale == "tiny":
        table = Study().changed(
            num_hidden_layers=6,
            hidden_size=128,
            num_attention_heads=4,
            evaluation_tokens=32_768,
            tokens=307_200,
            sequence_length=128,
            batch_size=8,
            vocabulary=2048,
        )
    else:
        table = Study(size=scale).changed(
            tokens=500_000_000,
            sequence_length=512,
            batch_size=64,
            compile="blocks",
            data=(COSMOPEDIA,),
            vocabulary=16_384,
            limit=2_500_000_000,
        )
    asked = DataConfig(data=table.data.data, limit=table.data.limit)
    table = table.changed(
        label="sink on text",
        position="learned",
        measure_every=0.25,
        weight_decay=0.5,
        begin_windows=True,
        log_every=20,
        questions={"opening": _documents(64, asked)},
    )
    yield table.arm("transformer", 2e-3)
    yield table.arm("softmax1", 2e-3)  # the intervention


def elimination(scale: str) -> Iterator[Study]:
    """The baseline with one part of it changed at a time."""
    table = _table(scale, "elimination")
    yield table.arm("transformer", *RATES)
    yield table.arm("transformer", *RATES, position="none")  # the interventions
    yield table.arm("transformer", *RATES, position="learned")
    yield table.arm("transformer", *RATES, bias=True)
    yield table.arm("transformer", *RATES, norm="layernorm")
    yield table.arm("transformer", *RATES, norm="rmsnorm-single")
    yield table.arm("transformer", *RATES, mlp="relu")
    yield table.arm("transformer", *RATES, qk_norm="rmsnorm")
    yield table.arm("transformer", *RATES, normalizer="softmax1")
    yield table.arm("transformer", *RATES, **{"train.weight_decay": 0.5})
    yield table.arm("transformer", *RATES, **{"train.optimizer": "orthoadam"})


def _table(scale: str, label: str) -> Study:
    text = ("synthetic:backcopy:documents=20000",)
    return Study(label=label).changed(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=128,
        measure_every=0.1,
        tokens=TOKENS[scale],
        sweep_tokens=TOKENS[scale] // 4,
        sequence_length=128,
        batch_size=32,
        document_masks=True,
        log_every=20,
        data=text,
        vocabulary=512,
        # Tokenised by the model's own vocabulary.
        questions={"opening": _documents(64, DataConfig(data=text))},
    )


def _documents(length: int, text: DataConfig) -> DiagnoseConfig:
    """A diagnosis of the first tokens of documents."""
    return DiagnoseConfig(models=(TRAINED,), length=length, at="documents", data=text)
