"""Claims on softmax-1 and OrthoAdam: arXiv 2410.17174."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.reproduce.contrasts import (
    LOSS,
    Claim,
    Contrast,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)
from clearhead.reproduce.readings import Patterns, Reading

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


def _annealed(words: str, what: Reading, least: float) -> Contrast:
    """SmolLM2-135M after a million tokens, against dense continuation that has the defect."""
    words = f"{words}, softmax-1 annealed into SmolLM2-135M against dense continuation"
    return lower(words, what, "softmax1 annealed", "dense", reaches(what, "dense", least, _HEALTHY))


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
        "Ours: where ordinary text has grown a sink, softmax-1 takes the attention from it.",
        "", "sink-text",
        (_sink("queries that look most at the first token, on ordinary text", "softmax1",
            "sink on text"),
        _annealed("queries that look most at the first token", number("first_token_argmax_share"),
            0.3),
        _annealed("perplexity added by w8a8-coarse", COARSE, 5))),
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
        "Ours: OrthoAdam, or one gain a norm, removes the outliers that 24 layers of SAS-P grow, and "
        "what they cost at 8 bits.",
        "", "outliers-deep",
        (lower("kurtosis, one rotation for each parameter", number("kurtosis", **_DEEP),
            "sas-p · orthoadam", "sas-p", reaches(number("kurtosis", **_DEEP), "sas-p", 4,
            _HEALTHY)),
        lower("perplexity added by w8a8-coarse", replace(COARSE, **_DEEP), "sas-p · orthoadam",
            "sas-p", reaches(replace(COARSE, **_DEEP), "sas-p", 0.5, _HEALTHY)),
        lower("kurtosis, one gain a norm", number("kurtosis", **_DEEP), "sas-p",
            "sas-p · norm rmsnorm", reaches(number("kurtosis", **_DEEP), "sas-p · norm rmsnorm", 4,
            _HEALTHY)))),
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
