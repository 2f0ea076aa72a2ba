"""Sinks and outlier activations, and what removes them: arXiv 2410.17174; `paper` is its 130M. On
ordinary text no sink forms within a day on two cores; on the bigrams of arXiv 2410.13835, which now
and then copy back, one forms in minutes, at documents' begin tokens."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from clearhead.papers.contrasts import LOSS, Claim, Contrast, Gate, lower, no_worse, number, ratio
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import COSMOPEDIA, WHOLE, Study, diagnose, experiment, quantize
from clearhead.settings.data import DataConfig

PAPER = "arXiv 2410.17174"
FEWER = ("w6a6-coarse", "w4a4-coarse")
# A rotation after training (QuaRot's) is the rival of one in the optimizer.
SCHEMES = (
    *("w8a8-coarse", "w8a8-moderate", "w8a8-fine", "w4-channel", "mxfp4", *FEWER),
    *("hadamard-w8a8-coarse", "hadamard-w4-channel", "hadamard-mxfp4"),
    *(f"hadamard-{one}" for one in FEWER),
)
# Rates of the ablation of optimizers; the paper gives none.
OPTIMIZERS = {
    "muon": (1e-2, 2e-2),
    "sgd": (0.1, 0.3, 1.0),
    "rmsprop": (3e-4, 1e-3, 3e-3),
    "adafactor": (1e-2, 3e-2, 9e-2),
}
REPAIRS: tuple[dict[str, Any], ...] = (
    {"train.optimizer": "orthoadam"},
    {"train.optimizer": "orthoadam", "train.rotation_share": "size"},
    {"normalizer": "softmax1"},
    {"normalizer": "softmax1", "train.optimizer": "orthoadam"},
    # Their rivals.
    {"train.optimizer": "muon"},
    {"epilogue": "gate"},
    {"qk_norm": "rmsnorm"},
    {"normalizer": "softpick"},  # arXiv 2504.20966
    {"epilogue": "gate-headwise"},  # arXiv 2505.06708
    {"embedding_projection": True, "train.optimizer": "muon"},  # the whole of arXiv 2506.19697
)
RATES = (1.5e-3, 3e-3, 6e-3)  # on the made text
_DOCUMENTS = partial(diagnose, length=64, at="documents")  # from their first tokens on


@experiment(PAPER, published=True)
def outliers(scale: str) -> Iterator[Study]:
    """Tables 2 and 3: AdamW and OrthoAdam × softmax and softmax-1, one gain a norm and no biases;
    OrthoAdam has the paper's rotation a parameter, and once one for all axes of a size."""
    table, (baseline,) = TABLES[scale], TABLES[scale].presets
    length, text = table.train.sequence_length, _text(table)
    bits = quantize(scheme=SCHEMES, length=length, tokens=32_768, data=text)
    rates = {"tiny": (3e-3, 6e-3), "small": (5e-4, 1e-3, 2e-3), "paper": (1e-3,)}[scale]
    tuned = {} if scale == "paper" else OPTIMIZERS
    others = ({"train.optimizer": name} for name in tuned if name != "muon")
    for changes in ({}, *REPAIRS, *others):  # the interventions
        swept = tuned.get(changes.get("train.optimizer", ""), rates)
        one = replace(table, questions={"bits": bits}).arm(baseline, *swept, **changes)
        # Claims find an arm by a name that begins with `transformer` at every scale.
        called = one.name.replace(baseline, "transformer", 1)
        yield one if baseline == "transformer" else replace(one, called=called)


@experiment(PAPER)
def sink(scale: str) -> Iterator[Study]:
    """Softmax, and every mechanism that gives idle heads something else to attend to; the weight on
    no key also by position, in documents of four training lengths."""
    table = _made(scale, "backcopy")
    long = DataConfig(data=("synthetic:backcopy:documents=100,characters=3200",), validation=WHOLE)
    longer = {"longer": _DOCUMENTS(length=512, data=long)}
    # The opening is the later question: of what both measure, its numbers count.
    table = replace(table, questions={**longer, **table.questions})
    # The interventions: a null key, a learned one, one with a place of its own, and a gate.
    yield from table.each(("transformer", "softmax1", "sink", "key-bias", "gated", "xsa"), *RATES)


@experiment(PAPER)
def sink_text(scale: str) -> Iterator[Study]:
    """Softmax and softmax-1 in the setting of arXiv 2410.10781 that grows sinks: none after 50 M
    unique tokens, and four per cent after 500 M."""
    questions = {"opening": _DOCUMENTS(data=_text(ORDINARY[scale]))}
    table = ORDINARY[scale].changed(position="learned", weight_decay=0.5, begin_windows=True)
    table = replace(table, label="sink on text", measure_every=0.25, questions=questions)
    yield from table.each(("transformer", "softmax1"), 2e-3)  # the intervention


@experiment(PAPER)
def elimination(scale: str) -> Iterator[Study]:
    """The baseline with one part of it changed at a time."""
    interventions = (
        *(("position", "none"), ("position", "learned"), ("bias", True)),
        *(("norm", "layernorm"), ("norm", "rmsnorm-single"), ("mlp", "relu")),
        *(("qk_norm", "rmsnorm"), ("normalizer", "softmax1")),
        *(("train.weight_decay", 0.5), ("train.optimizer", "orthoadam")),
    )
    table = _made(scale, "elimination")
    yield table.arm("transformer", *RATES)
    for key, value in interventions:
        yield table.arm("transformer", *RATES, **{key: value})


def _text(table: Study) -> DataConfig:
    """The sources of a table, for a model that has a tokenizer."""
    return DataConfig(data=table.data.data, limit=table.data.limit)


# fmt: off
def _made(scale: str, label: str) -> Study:
    tokens = {"tiny": 4_096_000, "small": 20_480_000}[scale]
    table = Study(label=label).changed(
        layers=2, width=64, heads=2, length=128, tokens=tokens, sweep_tokens=tokens // 4,
        measure_every=0.1, batch_size=32, document_masks=True,
        data=("synthetic:backcopy:documents=20000",), vocabulary=512)
    return replace(table, questions={"opening": _DOCUMENTS(data=_text(table))})


_OUTLIERS = Study(label="outliers", lengths=(1, 4), measure_every=0.1).changed(
    norm="rmsnorm-single", bias=False)
_NARROW: dict[str, Any] = {
    "layers": 6, "width": 128, "heads": 4, "evaluation_tokens": 32_768, "sequence_length": 128,
    "batch_size": 8, "vocabulary": 2048}
TABLES = {
    "tiny": _OUTLIERS.changed(
        **_NARROW, measure_every=0.25, tokens=2_000_000, sweep_tokens=409_600),
    "small": _OUTLIERS.changed(
        presets=("gpt2",), size="small", length=256, max_position_embeddings=1024,
        intermediate_size=2048, tokens=100_000_000, sweep_tokens=20_000_000, batch_size=128,
        compile="blocks", data=("hf:allenai/c4:en",), vocabulary=16_384, limit=500_000_000),
    "paper": RUNS["gpt2-130m"].changed(
        vary={}, label="outliers", lengths=(1, 4), measure_every=0.1),
}
ORDINARY = {
    "tiny": Study().changed(**_NARROW, tokens=307_200),
    "small": Study(size="small").changed(
        tokens=500_000_000, sequence_length=512, batch_size=64, compile="blocks",
        data=(COSMOPEDIA,), vocabulary=16_384, limit=2_500_000_000),
}
# fmt: on


# The claims

BASE, ADAMW = "transformer", ("transformer", "transformer · adamw", "transformer+adamw")
ORTHO, SHARED = "transformer · orthoadam", "transformer · orthoadam · rotation_share size"
FORMS = {"one rotation for each parameter": ORTHO, "one rotation for all axes of a size": SHARED}
SAFE = ("transformer · embedding_projection true · muon", "osp")
NEWER = {
    "softpick": ("transformer · normalizer softpick", "softpick"),
    "a headwise gate": ("transformer · epilogue gate-headwise", "gated-headwise"),
    "outlier-safe pre-training": SAFE,
}
_ADDED = partial(number, "added_perplexity")
_COARSE = _ADDED(scheme="w8a8-coarse")
# At 8 bits the outliers of models this small cost too little to be repaired.
_FEW = [_ADDED(scheme=scheme) for scheme in FEWER]
_RIVALS = (replace(_COARSE, label="outliers"), *_FEW)
_SHARES = [replace(one, metric="cost") for one in _FEW]
_DEEP = partial(number, label="deep outliers")


def _sink(words: str, arm: str, label: str, **options: Any) -> Contrast:
    words = f"queries that look most at the first token, {words}"
    share = number("first_token_argmax_share", at="documents", label=label)
    return lower(words, share, arm, BASE, least=0.3, **options)


def _costs(words: str, arm: Any, than: Any = ADAMW, what: Any = _COARSE) -> Contrast:
    """The perplexity that few bits add, or its share, where they cost the baseline something."""
    added = replace(what, metric="added_perplexity")
    gate = Gate(added.of(ADAMW), 0.5, "added perplexity of the baseline")
    share = "share of " * (what.metric == "cost")
    words = f"{share}perplexity added by {what.at['scheme']}, {words}"
    return lower(words, what, arm, than, gate)


def _kurtosis(words: str, arm: Any, *, own_rates: bool = False, **at: Any) -> Contrast:
    """Kurtosis, where the baseline has outliers."""
    words = f"kurtosis {words}" + ", each at its own rate" * own_rates
    what = number("kurtosis", **at)
    gate = Gate(what.of(ADAMW), 4, "kurtosis of the model compared with")
    return lower(words, what, arm, ADAMW, gate, own_rates=own_rates)


def _fades(words: str, metric: str, arm: str, **bound: Any) -> Contrast:
    """A weight late in a text, as a share of that early on."""
    at: dict[str, Any] = {"map": "softmax"} if metric == "null_mass" else {}
    late, early = (number(metric, label="backcopy", position=n, **at) for n in (256, 32))
    words = f"{words} at positions 256 to 511, as a share of that at 32 to 63"
    return ratio(words, late, arm, early.of(arm), **bound)


# fmt: off
CLAIMS = (
    Claim("softmax1/share", "Softmax-1 takes the attention from the first token.",
        "the largest weight in 65 % of cases with softmax, in 3.3 % with softmax-1", "sink",
        (_sink("on a text that grows a sink", "softmax1", "backcopy"),)),
    Claim("softmax1/text",
        "Ours: where ordinary text grows a sink, softmax-1 takes the attention from it.",
        "", "sink-text", (_sink("on ordinary text", "softmax1", "sink on text"),)),
    Claim("softmax1/cause", "Positions do not make the sink: softmax does.",
        "neither positions, biases nor norms", "elimination",
        (_sink("without positions", f"{BASE} · position none", "elimination", margin=0.1,
            claimed="higher"),
        _sink("with softmax-1", f"{BASE} · normalizer softmax1", "elimination"))),
    Claim("softmax1/loss", "Softmax-1 costs no loss.", "equal to the second digit", "outliers",
        (no_worse("loss on text", LOSS, (f"{BASE} · normalizer softmax1", "softmax1 · adamw",
            "softmax1"), ADAMW, by=0.01),)),
    Claim("softmax1/kurtosis", "OrthoAdam removes outlier activations.",
        "kurtosis 1,657 under Adam, 3.1 under OrthoAdam", "outliers",
        tuple(_kurtosis(f"of the {which}, {form}", arm, tokens=tokens)
            for form, arm in FORMS.items()
            for which, tokens in (("first token", "first"), ("other tokens", "rest"))),
        also=("softmax1/table2",)),
    Claim("softmax1/optimizers", "Adam's per-coordinate step makes outliers; SGD does not.",
        "", "outliers", tuple(_kurtosis(f"under {name}", f"{BASE} · {name.lower()}", own_rates=True)
            for name in ("SGD", "Muon"))),
    Claim("softmax1/deep", "Ours: OrthoAdam, or one gain a norm, removes the outliers that 24 "
        "layers of SAS-P grow, and what they cost at few bits.", "", "outliers-deep",
        (lower("kurtosis, one rotation for each parameter", _DEEP("kurtosis"),
            "sas-p · orthoadam", "sas-p", least=4),
        lower("perplexity added by w8a8-coarse", replace(_COARSE, label="deep outliers"),
            "sas-p · orthoadam", "sas-p", least=0.5),
        lower("kurtosis, one gain a norm", _DEEP("kurtosis"), "sas-p", "sas-p · norm rmsnorm",
            least=4),
        *(lower(f"perplexity added by {scheme}, one gain a norm", _ADDED(scheme=scheme,
            label="deep outliers"), "sas-p", "sas-p · norm rmsnorm", least=0.5)
            for scheme in FEWER))),
    Claim("softmax1/table3", "OrthoAdam makes few bits cheaper, with softmax-1 and alone.",
        "coarse 8 bits add 23.6 to perplexity without them, 0.43 with them (GPT-2, 130M)",
        "outliers",
        (*(_costs(words, arm, what=what) for what in (_COARSE, *_FEW) for words, arm in (
            ("both repairs", (f"{BASE} · normalizer softmax1 · orthoadam", "softmax1 · orthoadam")),
            ("OrthoAdam alone", ORTHO))),
        _costs("OrthoAdam alone, one rotation for all axes of a size",
            (SHARED, "transformer+orthoadam")))),
    Claim("softmax1/rivals", "Ours: OrthoAdam makes few bits cheaper than rotation after training, "
        "Muon, a gate and QK norm do.", "", "outliers",
        (*(_costs("OrthoAdam against AdamW rotated after training", ORTHO,
            replace(what, at={"scheme": f"hadamard-{what.at['scheme']}"}).of(ADAMW), what)
            for what in _RIVALS),
        *(_costs("OrthoAdam against Muon", ORTHO, f"{BASE} · muon", what) for what in _RIVALS),
        *(_costs(f"OrthoAdam against {name}", ORTHO, f"{BASE} · {arm}", _RIVALS[0]) for name, arm
            in (("a gate", "epilogue gate"), ("normed queries and keys", "qk_norm rmsnorm"))))),
    Claim("softmax1/newer", "Softpick (arXiv 2504.20966), a headwise gate (2505.06708) and "
        "outlier-safe pre-training (2506.19697) have smaller outliers than AdamW and make few bits "
        "cheaper; the last makes them cheaper than OrthoAdam does.", "", "outliers",
        (*(_kurtosis(f"of other tokens, {name}", arm, own_rates=True, tokens="rest")
            for name, arm in NEWER.items()),
        *(_costs(f"{name} against AdamW", arm, ADAMW, what)
            for name, arm in NEWER.items() for what in _SHARES),
        *(_costs("outlier-safe pre-training against OrthoAdam", SAFE, ORTHO, what)
            for what in _SHARES))),
    Claim("softmax1/move", "Ours: outliers do not move to the rotated basis.", "", "outliers",
        tuple(no_worse(f"kurtosis in the optimizer's basis, {form}", number("kurtosis_rotated"),
            arm, ADAMW, *_kurtosis("", arm).gates, by=1) for form, arm in FORMS.items())),
    Claim("softmax1/fading",
        "Ours: a fixed null key's weight fades as texts grow; a learned key's and a gate's do not.",
        "", "sink",
        (_fades("weight on softmax-1's null key", "null_mass", "softmax1", claimed="lower"),
        _fades("weight on a learned logit", "null_mass", "sink", claimed="lower"),
        _fades("weight on a learned key", "null_mass", "key-bias", at_least=0.9),
        _fades("how far a gate is closed", "gate_closed", "gated", at_least=0.9))),
)
# fmt: on
