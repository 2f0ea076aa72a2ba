"""Sinks and outlier activations, and what removes them: arXiv 2410.17174.

`paper` is the recipe of 130M (`recipes`). All arms have one rate there, as in the paper.

On ordinary text no sink forms within a day on two cores. On the synthetic text of arXiv 2410.13835,
bigrams that now and then copy back, one forms in minutes, so `sink` and `elimination` train on it.
It shows in windows that start at a document's begin token: both diagnose such windows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.papers.contrasts import (
    LOSS,
    Claim,
    Contrast,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)
from clearhead.papers.readings import Patterns, Reading
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import COSMOPEDIA, WHOLE, Study, diagnose, experiment, quantize

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
    """Softmax, and every mechanism that gives idle heads something else to attend to.

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


# The claims

BASE, ADAMW = "transformer", ("transformer", "transformer · adamw", "transformer+adamw")
ORTHO, SHARED = "transformer · orthoadam", "transformer · orthoadam · rotation_share size"
FORMS = {"one rotation for each parameter": ORTHO, "one rotation for all axes of a size": SHARED}
COARSE = number("added_perplexity", scheme="w8a8-coarse")
_SINK = number("first_token_argmax_share", at="documents")
_HEALTHY = "the number compared with"


def _sink(
    words: str, arm: str, label: str, verb: Callable[..., Contrast] = lower, **options: Any
) -> Contrast:
    """The first token's share, where the baseline has a sink."""
    what = replace(_SINK, label=label)
    return verb(words, what, arm, BASE, reaches(what, BASE, 0.3, _HEALTHY), **options)


def _costs(
    words: str, arm: Patterns, than: Patterns | Reading = ADAMW, what: Reading = COARSE
) -> Contrast:
    """The cost of few bits, where they cost the baseline something: the perplexity that they add,
    or its share of that in full precision, for arms that differ in it."""
    added = replace(what, metric="added_perplexity")
    gate = reaches(added, ADAMW, 0.5, "added perplexity of the baseline")
    share = "share of " * (what.metric == "cost")
    words = f"{share}perplexity added by {what.at['scheme']}, {words}"
    return lower(words, what, arm, than, gate)


def _fades(words: str, metric: str, arm: str, **bound: Any) -> Contrast:
    """A weight late in a text, as a share of that early on."""
    at: dict[str, Any] = {"map": "softmax"} if metric == "null_mass" else {}
    late, early = (number(metric, label="backcopy", position=n, **at) for n in (256, 32))
    words = f"{words} at positions 256 to 511, as a share of that at 32 to 63"
    return ratio(words, late, arm, early.of(arm), **bound)


def _kurtosis(
    words: str,
    arm: Patterns,
    verb: Callable[..., Contrast] = lower,
    metric: str = "kurtosis",
    **at: Any,
) -> Contrast:
    """Kurtosis, where the baseline has outliers."""
    options: dict[str, Any] = {"by": 1} if verb is no_worse else {}
    gate = reaches(number("kurtosis", **at), ADAMW, 4, "kurtosis of the model compared with")
    return verb(words, number(metric, **at), arm, ADAMW, gate, **options)


_DEEP: dict[str, Any] = {"label": "deep outliers"}
_RIVALS = replace(COARSE, label="outliers")
# At 8 bits the outliers of models this small cost too little to be repaired.
_FEW = [number("added_perplexity", scheme=scheme) for scheme in ("w6a6-coarse", "w4a4-coarse")]
_SHARES = [replace(one, metric="cost") for one in _FEW]
_BOTH = ("transformer · normalizer softmax1 · orthoadam", "softmax1 · orthoadam")
_SAFE = ("transformer · embedding_projection true · muon", "osp")
_NEWER: dict[str, Patterns] = {
    "softpick": ("transformer · normalizer softpick", "softpick"),
    "a headwise gate": ("transformer · epilogue gate-headwise", "gated-headwise"),
    "outlier-safe pre-training": _SAFE,
}

# fmt: off
CLAIMS = (
    Claim("softmax1/share", "Softmax-1 takes the attention from the first token.",
        "the largest weight in 65 % of cases with softmax, in 3.3 % with softmax-1", "sink",
        (_sink("queries that look most at the first token, on a text that grows a sink", "softmax1",
            "backcopy"),)),
    Claim("softmax1/text",
        "Ours: where ordinary text grows a sink, softmax-1 takes the attention from it.",
        "", "sink-text",
        (_sink("queries that look most at the first token, on ordinary text", "softmax1",
            "sink on text"),)),
    Claim("softmax1/cause", "Positions do not make the sink: softmax does.",
        "neither positions, biases nor norms", "elimination",
        (_sink("queries that look most at the first token, without positions",
            "transformer · position none", "elimination", no_worse, by=0.1, better="higher"),
        _sink("queries that look most at the first token, with softmax-1",
            "transformer · normalizer softmax1", "elimination"))),
    Claim("softmax1/loss", "Softmax-1 costs no loss.",
        "equal to the second digit", "outliers",
        (no_worse("loss on text", LOSS, ("transformer · normalizer softmax1", "softmax1 · adamw",
            "softmax1"), ADAMW, by=0.01),)),
    Claim("softmax1/kurtosis", "OrthoAdam removes outlier activations.",
        "kurtosis 1,657 under Adam, 3.1 under OrthoAdam", "outliers",
        tuple(_kurtosis(f"kurtosis of the {which}, {form}", arm, tokens=tokens) for form,
            arm in FORMS.items() for which, tokens in (("first token", "first"), ("other tokens",
            "rest"))), also=("softmax1/table2",)),
    Claim("softmax1/optimizers", "Adam's per-coordinate step makes outliers; SGD does not.",
        "", "outliers",
        tuple(replace(_kurtosis(f"kurtosis under {name}, each at its own rate",
            f"transformer · {name.lower()}"), own_rates=True) for name in ("SGD", "Muon"))),
    Claim("softmax1/deep",
        "Ours: OrthoAdam, or one gain a norm, removes the outliers that 24 layers of SAS-P grow, "
        "and what they cost at few bits.",
        "", "outliers-deep",
        (lower("kurtosis, one rotation for each parameter", number("kurtosis", **_DEEP),
            "sas-p · orthoadam", "sas-p", reaches(number("kurtosis", **_DEEP), "sas-p", 4,
            _HEALTHY)),
        lower("perplexity added by w8a8-coarse", replace(COARSE, **_DEEP), "sas-p · orthoadam",
            "sas-p", reaches(replace(COARSE, **_DEEP), "sas-p", 0.5, _HEALTHY)),
        lower("kurtosis, one gain a norm", number("kurtosis", **_DEEP), "sas-p",
            "sas-p · norm rmsnorm", reaches(number("kurtosis", **_DEEP), "sas-p · norm rmsnorm", 4,
            _HEALTHY)),
        *(lower(f"perplexity added by {what.at['scheme']}, one gain a norm", replace(what, **_DEEP),
            "sas-p", "sas-p · norm rmsnorm", reaches(replace(what, **_DEEP), "sas-p · norm rmsnorm",
            0.5, _HEALTHY)) for what in _FEW))),
    Claim("softmax1/table3", "OrthoAdam makes few bits cheaper, with softmax-1 and alone.",
        "coarse 8 bits add 23.6 to perplexity without them, 0.43 with them (GPT-2, 130M)",
            "outliers",
        (*(_costs(words, arm, ADAMW, what) for what in (COARSE, *_FEW) for words, arm in (
            ("both repairs", _BOTH), ("OrthoAdam alone", ORTHO))),
        _costs("OrthoAdam alone, one rotation for all axes of a size", (SHARED,
            "transformer+orthoadam")))),
    Claim("softmax1/rivals",
        "Ours: OrthoAdam makes few bits cheaper than rotation after training, Muon, a gate and QK "
        "norm do.",
        "", "outliers",
        (*(_costs("OrthoAdam against AdamW rotated after training", ORTHO,
            replace(what, at={"scheme": f"hadamard-{what.at['scheme']}"}).of(ADAMW), what)
            for what in (_RIVALS, *_FEW)),
        *(_costs("OrthoAdam against Muon", ORTHO, "transformer · muon", what) for what in
            (_RIVALS, *_FEW)),
        *(_costs(f"OrthoAdam against {name}", ORTHO, f"transformer · {arm}", _RIVALS) for name,
            arm in (("a gate", "epilogue gate"), ("normed queries and keys", "qk_norm rmsnorm"))))),
    Claim("softmax1/newer",
        "Softpick (arXiv 2504.20966), a headwise gate (2505.06708) and outlier-safe pre-training "
        "(2506.19697) have smaller outliers than AdamW and make few bits cheaper; the last makes "
        "them cheaper than OrthoAdam does.",
        "", "outliers",
        (*(replace(_kurtosis(f"kurtosis of other tokens, {name}, each at its own rate", arm,
            tokens="rest"), own_rates=True) for name, arm in _NEWER.items()),
        *(_costs(f"{name} against AdamW", arm, ADAMW, what) for name, arm in _NEWER.items()
            for what in _SHARES),
        *(_costs("outlier-safe pre-training against OrthoAdam", _SAFE, ORTHO, what)
            for what in _SHARES))),
    Claim("softmax1/move", "Ours: outliers do not move to the rotated basis.",
        "", "outliers",
        tuple(_kurtosis(f"kurtosis in the optimizer's basis, {form}", arm, no_worse,
            "kurtosis_rotated") for form, arm in FORMS.items())),
    Claim("softmax1/fading",
        "Ours: a fixed null key's weight fades as texts grow; a learned key's and a gate's do not.",
        "", "sink",
        (_fades("weight on softmax-1's null key", "null_mass", "softmax1", below=1),
        _fades("weight on a learned logit", "null_mass", "sink", below=1),
        _fades("weight on a learned key", "null_mass", "key-bias", at_least=0.9),
        _fades("how far a gate is closed", "gate_closed", "gated", at_least=0.9))),
)
# fmt: on
