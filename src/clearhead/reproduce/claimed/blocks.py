"""Claims on simplified blocks: arXiv 2311.01906."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.reproduce.contrasts import (
    LOSS,
    Claim,
    Contrast,
    higher,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)
from clearhead.reproduce.readings import Reading

BASE = "transformer"
DEEP, DEEP_BASE = ("sas-p", "sas-p, 24 layers"), (BASE, "transformer, 24 layers")
_MATRICES = "· values reparametrised · projections reparametrised"
_GAINED = f"{_MATRICES} · value_gain 0.2"
_MARGIN = 0.02  # nats
_SHALLOW = replace(LOSS, label="*[68] layers")
_24_LAYERS = replace(LOSS, label="[27][42] layers")
_BOOKS = replace(LOSS, label="*books")
_SIGNAL: dict[str, Any] = {"label": "signal", "layer": 23}


def _from_start(
    words: str,
    metric: str,
    verb: Callable[..., Contrast] = ratio,
    *,
    model: str = "sas",
    **options: Any,
) -> Contrast:
    """A gain after training, against its start."""
    at: dict[str, Any] = {"layer": 0} if metric.endswith("_values") else {}
    before = number(metric, label="ratios at the start", **at)
    arm = f"{model} {_GAINED}"
    return verb(words, number(metric, label="ratios", **at), arm, before.of(arm), **options)


def _lead(label: str) -> Reading:
    """The lead of SAS-P over Pre-LN."""
    loss = replace(LOSS, label=label)
    return loss.of(BASE, minus=loss.of("sas-p"))


def _tuned(preset: str) -> tuple[str, str]:
    return f"{preset} on banking77", f"{preset} on *"


# fmt: off
CLAIMS = (
    Claim("sas/propagation",
        "Without skips, shaped attention keeps tokens apart through 24 layers.",
        "", "signal",
        (lower("cosine of two tokens after 24 layers, SAS-P against no skip and no shaping",
            number("similarity", **_SIGNAL), "sas-p", "transformer · attention_skip none"),
        no_worse("cosine of two tokens after 24 layers, SAS-P against Pre-LN", number("similarity",
            **_SIGNAL), "sas-p", BASE),
        higher("effective rank of a text's tokens after 24 layers, SAS-P against no skip and no "
            "shaping", number("effective_rank", **_SIGNAL), "sas-p",
            "transformer · attention_skip none")), by_construction=True),
    Claim("sas/figure2", "Blocks without skips, as first published, train worse than Pre-LN.",
        "a gap at every step", "blocks",
        (higher("loss of V-SkipInit, 6 layers", _SHALLOW, ("skipless · shaping skipinit",
            "skipless, 2023", "skipless, 2023, 24 layers"), DEEP_BASE),)),
    Claim("sas/figure5", "SAS and SAS-P reach Pre-LN's loss in as many steps.",
        "1.178 (SAS) against 1.191", "blocks",
        (no_worse("loss of SAS, 6 layers", _SHALLOW, "sas", BASE, by=_MARGIN),
        no_worse("loss of SAS-P, 6 layers", _SHALLOW, "sas-p", BASE, by=_MARGIN),
        no_worse("loss of SAS-P, 24 layers", _24_LAYERS, DEEP, DEEP_BASE, by=_MARGIN))),
    Claim("sas/identity", "Identity values are no worse than trained ones.",
        "1.178 against 1.194", "blocks",
        (no_worse("loss with identity values against trained ones", _SHALLOW, "sas",
            (f"sas {_MATRICES}", "sas, trained values, β 1"), by=_MARGIN),), also=("sas/figure3",)),
    Claim("sas/figure4",
        "Without attention's skip, trained values and projections return to the identity, but for "
        "the first layer's values.",
        "β/α goes from 0.2 to 0 in 43,000 steps; in the first layer's values it stays above 0.05",
            "ratios",
        (_from_start("all but the first layer's values: mean |β/α| as a share of its start, 0.2 "
            "(at most 0.25)", "beta_over_alpha", at_most=0.25),
        _from_start("the first layer's values: |β/α| as a share of its start, 0.2 (at least 0.25)",
            "beta_over_alpha_values", at_least=0.25))),
    Claim("sas/figure22",
        "With the skip (Pre-LN), trained values and projections leave the identity.",
        "β/α grows", "ratios",
        (_from_start("mean β/α of all but the first layer's values, Pre-LN after training against "
            "its start", "beta_over_alpha", higher, model=BASE),
        higher("mean β/α of all but the first layer's values, Pre-LN against SAS",
            number("beta_over_alpha", label="ratios"), f"{BASE} {_GAINED}", f"sas {_GAINED}"))),
    Claim("sas/residual", "A small gain of the MLP branch is better than a gain of 1.",
        "0.1 better than 0.3 and 1", "blocks",
        (lower("loss with the gain by depth against gain 1", _SHALLOW, "sas", ("sas · mlp_gain 1.0",
            "sas, β_FF 1")),), also=("sas/figure13",)),
    Claim("sas/depth", "Shaped blocks train in deep models, and lead after three times the tokens.",
        "Pre-LN, SAS and SAS-P level at 72 layers", "depth",
        (no_worse("loss of SAS-P in the deep model", _24_LAYERS, DEEP, DEEP_BASE, by=_MARGIN),
        lower("loss of SAS-P after the long run", replace(LOSS, label="* layers for longer"),
            "sas-p", BASE)), also=("sas/figure6", "sas/figure8")),
    Claim("sas/languini", "Simplified blocks keep up with Pre-LN on other text (Languini books).",
        "", "blocks-books",
        tuple(no_worse(f"loss of {arm.upper()} on books", _BOOKS, arm, BASE, by=_MARGIN)
            for arm in ("sas", "sas-p"))),
    Claim("sas/scaling", "The lead of simplified blocks shrinks as models and tokens grow.",
        "", "blocks-scaling",
        (lower("loss of Pre-LN less SAS-P's, the widest model against the narrowest", LOSS,
            _lead("wide, *"), _lead("narrow, *"), reaches(_lead("narrow, *"), BASE, 0.02,
            "the lead compared with")),)),
    Claim("sas/longer", "Ours: the lead of SAS survives ten and twenty tokens a parameter.",
        "", "blocks-longer",
        tuple(lower(f"loss after {many} tokens a parameter", replace(LOSS, label=f"{many} tokens*"),
            "sas", BASE) for many in ("ten", "twenty"))),
    Claim("sas/bert", "Crammed BERTs of simplified blocks keep the loss of hidden tokens.",
        "80.0 against 80.4 on GLUE after a day", "encoders",
        (no_worse("loss at hidden tokens", number("masked loss", times=1), "bert-sas-p", "bert",
            by=0.05),), also=("sas/figure7",)),
    Claim("sas/glue",
        "Crammed BERTs of simplified blocks keep the score after fine-tuning (GLUE; here "
        "Banking-77).",
        "80.0 against 80.4", "encoders",
        tuple(no_worse(f"accuracy of {arm.upper()} after fine-tuning", number("accuracy"),
            _tuned(f"bert-{arm}"), _tuned("bert"), reaches(number("accuracy"), _tuned("bert"), 0.6,
            "the number compared with"), by=0.02, better="higher") for arm in ("sas", "sas-p")),
            also=("sas/table2",)),
    Claim("sas/table1", "SAS-P trains faster than Pre-LN.",
        "1.16 × the throughput, with 15 % fewer parameters", "speed",
        (ratio("tokens a second of SAS-P against the baseline's, on the record's device",
            number("tokens_per_second", label="speed"), "sas-p", BASE),)),
    Claim("sas/outliers", "Ours: simplified blocks have no larger outliers.",
        "", "blocks",
        tuple(no_worse(f"kurtosis of the hidden states, SAS-P, {layers} layers",
            number("kurtosis", label=label), DEEP, DEEP_BASE, by=1)
            for layers, label in ((6, "*[68] layers"), (24, "[27][42] layers")))),
)
# fmt: on
