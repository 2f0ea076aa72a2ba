"""Blocks without some of their parts: arXiv 2311.01906. `paper` is CodeParrot's recipe, and for
encoders the crammed BERT's on the most similar public text; PG-19 stands for Languini's books."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from clearhead.lab.configs import FinetuneJob
from clearhead.papers.contrasts import LOSS, Claim, Gate, higher, lower, no_worse, number, ratio
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import BOOKS, COSMOPEDIA, TRAINED, Study, diagnose, experiment, quantize
from clearhead.settings.train import FinetuneConfig

PAPER = "arXiv 2311.01906"
LOW, MIDDLE, HIGH = (1e-3, 2e-3, 4e-3), (2e-3, 4e-3, 8e-3), (4e-3, 8e-3, 1.6e-2)
PRE_LN = {4: MIDDLE, 6: MIDDLE, 12: LOW, 24: LOW, 18: (1e-3,), 72: (1e-3,)}
SAS = {4: HIGH, 6: HIGH, 12: MIDDLE, 24: MIDDLE, 18: (1e-3,), 72: (1e-3,)}
# Preset → layers → rates.
RATES = {
    **dict.fromkeys(("transformer", "parallel"), PRE_LN),
    **dict.fromkeys(("sas", "sas-p"), SAS),
    "sas-p-nonorm": SAS | {24: (1e-3, 2e-3, 4e-3, 8e-3)},
    "skipless": {6: LOW, 24: (5e-4, 1e-3, 2e-3), 18: (3e-4,), 72: (1e-4,)},
}
VALUES = {"values": "reparametrised", "projections": "reparametrised"}
MATRICES: dict[str, Any] = {**VALUES, "value_gain": 0.2}
ORTHOADAM = {"train.optimizer": "orthoadam"}
MEASURED: dict[str, Any] = {"evaluation_tokens": 131_072, "measure_every": 0.1}
_STUDY = Study(**MEASURED).changed(heads=4, mlp="relu", length=128)
_BASES = {
    # A small vocabulary: otherwise the output head takes half of the time.
    "tiny": _STUDY.changed(batch_size=8, vocabulary=1024, evaluation_tokens=65_536),
    "small": _STUDY.changed(batch_size=64, compile="blocks"),
}


def _table(scale: str, layers: int, width: int, tokens: int, sweep: int, **others: Any) -> Study:
    given = {"label": f"{layers} layers", "sweep_tokens": sweep, **others}
    return _BASES[scale].changed(layers=layers, width=width, tokens=tokens, **given)


# Layers → the table that all arms of this depth share; and the deep model's, with the rates of so
# many layers.
TABLES = {
    "tiny": {6: _table("tiny", 6, 128, 307_200, 102_400)},
    "small": {
        6: _table("small", 6, 256, 8_192_000, 4_096_000),
        24: _table("small", 24, 256, 4_915_200, 2_048_000),
    },
    "paper": {
        18: RUNS["codeparrot"].changed(label="18 layers", **MEASURED),
        72: RUNS["codeparrot-72"].changed(label="72 layers", **MEASURED),
    },
}
DEEP = {
    "tiny": (24, _table("tiny", 24, 64, 256_000, 64_000)),
    "small": (24, _table("small", 72, 256, 4_915_200, 2_048_000)),
    "paper": (72, TABLES["paper"][72]),
}


def _arms(table: Study, layers: int, *presets: str, **changes: Any) -> Iterator[Study]:
    """The arms of several presets, each at the rates of so many layers."""
    return (table.arm(preset, *RATES[preset][layers], **changes) for preset in presets)


@experiment(PAPER, published=True)
def blocks(scale: str) -> Iterator[Study]:
    """Figures 3, 6 and 13: every block at the depths of a scale, variants of SAS at the smaller."""
    for layers, table in TABLES[scale].items():
        # The interventions: parts of the block that are left out, put side by side or reweighed.
        yield from _arms(table, layers, "transformer", "parallel", "skipless")
        yield from _arms(table, layers, "skipless", shaping="skipinit")
        yield from _arms(table, layers, "sas", "sas-p", "sas-p-nonorm")
        if layers in (6, 18):
            for gain in (0.05, 0.3, 1.0):
                yield from _arms(table, layers, "sas", mlp_gain=gain)
            yield table.arm("sas", *PRE_LN[layers], **VALUES)
            yield from _arms(table, layers, "sas", **MATRICES)


@experiment(PAPER, published=True)
def depth(scale: str) -> Iterator[Study]:
    """SAS-P against Pre-LN in deep models, and after three times the tokens of `blocks`."""
    layers, short = next(iter(TABLES[scale].items()))
    long = short.changed(tokens=3 * short.train.tokens, label=f"{short.label} for longer")
    for place, table in (DEEP[scale], (layers, long)):
        yield from _arms(table, place, "transformer", "sas-p")  # the intervention


@experiment(PAPER)
def blocks_longer(scale: str) -> Iterator[Study]:
    """SAS against Pre-LN on text that is read once."""
    many: dict[str, Any] = {"label": "ten tokens a parameter"}
    if scale == "tiny":
        tables = {4: _table("tiny", 4, 64, 2_600_000, 400_000, **many)}
    else:
        many |= {"batch_size": 128, "data": (COSMOPEDIA,), "limit": 1_200_000_000}
        tables = {12: _table("small", 12, 384, 250_000_000, 10_000_000, **many)}
        many |= {"label": "twenty tokens a parameter", "data": ("python-packages",)}
        many |= {"limit": 60_000_000, "vocabulary": 1024}
        tables[6] = _table("small", 6, 128, 26_214_400, 2_621_440, **many)
    for layers, table in tables.items():
        yield from _arms(table, layers, "transformer", "sas")  # the intervention


@experiment("arXiv 2410.17174")
def outliers_deep(scale: str) -> Iterator[Study]:
    """AdamW and OrthoAdam × Pre-LN and SAS-P in 24 layers, where SAS-P grows outliers."""
    few = ("w6a6-coarse", "w4a4-coarse", "hadamard-w6a6-coarse", "hadamard-w4a4-coarse")
    schemes = ("w8a8-coarse", "w8a8-token", "w4-channel", "w3-channel")
    bits = quantize(scheme=schemes + few, length=128, tokens=32_768)
    table = TABLES["small"][24] if scale == "small" else DEEP["tiny"][1]
    # OrthoAdam's argument needs norms of one gain.
    table = table.changed(norm="rmsnorm-single", label="deep outliers", questions={"bits": bits})
    shared = ORTHOADAM | {"train.rotation_share": "size"}  # the paper's is a parameter's own
    for preset, changes in product(("transformer", "sas-p"), ({}, ORTHOADAM, shared)):
        yield from _arms(table, 24, preset, **changes)  # the interventions
    if scale == "small":  # SAS-P as it grew kurtosis 100: a gain for each channel
        yield from _arms(table, 24, "sas-p", norm="rmsnorm")


@experiment(PAPER)
def blocks_books(scale: str) -> Iterator[Study]:
    """SAS and SAS-P against Pre-LN on books in place of code."""
    table = TABLES[scale][6].changed(data=(BOOKS,), limit=100_000_000, label="6 layers, books")
    yield from _arms(table, 6, "transformer", "sas", "sas-p")  # the interventions


@experiment(PAPER)
def blocks_scaling(scale: str) -> Iterator[Study]:
    """SAS-P against Pre-LN at three widths, with tokens in proportion to the parameters."""
    least, *widths = {"tiny": (102_400, 64, 128, 192), "small": (2_048_000, 128, 256, 512)}[scale]
    for name, width in zip(("narrow", "middle", "wide"), widths, strict=True):
        tokens = least * width**2 // widths[0] ** 2
        table = _table(scale, 6, width, tokens, tokens // 4, label=f"{name}, {width}")
        yield from _arms(table, 6, "transformer", "sas-p")  # the intervention


@experiment(PAPER)
def signal(scale: str) -> Iterator[Study]:
    """Similarity of two tokens after 24 layers with fresh weights."""
    table = _STUDY.changed(layers=24, width=256, label="signal", seeds=tuple(range(5)))
    table = replace(table, questions={"signal": diagnose(length=128, windows=4)})
    yield table.arm("transformer", attention_skip="none")
    yield from table.each(("transformer", "skipless", "sas", "sas-p"))  # the interventions


@experiment(PAPER, published=True)
def ratios(scale: str) -> Iterator[Study]:
    """Blocks without and with attention's skip, trained and at their start: figures 4 and 22."""
    # W = α I + β ΔW in every layer, from β = 0.2 as in the authors' script of figure 4 (figure 22's
    # is not published). β/α is measured from the weights alone: a little text suffices.
    layers, table = next(iter(TABLES[scale].items()))  # the least deep
    table = replace(table, questions={"ratios": diagnose(length=128, windows=4)})
    for label, trained in (("ratios", True), ("ratios at the start", False)):
        for one in _arms(replace(table, label=label), layers, "transformer", "sas", **MATRICES):
            yield one if trained else replace(one, tries=())  # the intervention


@experiment(PAPER, published=True)
def encoders(scale: str) -> Iterator[Study]:
    """Tables 1 and 2: hidden tokens, then classification from every pretrained seed at one rate:
    GLUE, and but for `paper` Banking-77, since models of this size guess at GLUE. The baseline's
    rate at `paper` is arXiv 2212.14034's."""
    table = ENCODERS[scale]
    baseline, simplified = ((1e-3,), (3e-3,)) if scale == "paper" else (LOW, LOW)
    yield table.arm("bert", *baseline)
    yield from table.each(("bert-sas", "bert-sas-p"), *simplified)  # the interventions
    if scale != "paper":  # of CoCA: its authors train no encoder
        table = replace(table, questions={})
        yield table.arm("bert", *baseline, position="rope")
        yield table.arm("bert", *baseline, position="rope", scores="coca")


def _tasks(*tasks: str, rate: float = 1e-3, epochs: int = 5) -> dict[str, FinetuneJob]:
    train = FinetuneConfig(learning_rate=rate, epochs=epochs)
    return {task: FinetuneJob(model=TRAINED, task=task, train=train) for task in tasks}


# fmt: off
_BERT = RUNS["crammed"].changed(seeds=(0, 1, 2), label="encoders")
# The crammed recipe in steps of one batch.
_SHORT = Study(label="encoders", train=_BERT.train).changed(
    accumulation=1, ramp=0.0, compile="none", save_every=0)
ENCODERS = {
    "tiny": _SHORT.changed(
        tokens=2_000_000, sweep_tokens=600_000, data=("hf:Salesforce/wikitext:wikitext-2-raw-v1",),
        # 626 steps of Banking-77; five epochs take a core 8 min.
        questions=_tasks("rte") | _tasks("banking77", epochs=2)),
    "small": _SHORT.changed(
        tokens=20_000_000, sweep_tokens=5_000_000,
        data=("hf:Salesforce/wikitext:wikitext-103-raw-v1",),
        questions=_tasks("rte", "mrpc", "cola", "qnli", "banking77")),
    "paper": replace(_BERT, questions=_tasks(
        "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", rate=1.5e-4)),
}
# fmt: on


# The claims

BASE, MARGIN = "transformer", 0.02  # nats
DEEP_ARMS = ("sas-p", "sas-p, 24 layers"), (BASE, "transformer, 24 layers")
GAINED = "· values reparametrised · projections reparametrised · value_gain 0.2"
_SHALLOW, _24_LAYERS = replace(LOSS, label="*[68] layers"), replace(LOSS, label="[27][42] layers")
_WIDE, _NARROW = (
    loss.of(BASE, minus=loss.of("sas-p"))  # the lead of SAS-P
    for loss in (replace(LOSS, label=label) for label in ("wide, *", "narrow, *"))
)
_BETA = number("beta_over_alpha", label="ratios")
_TUNED = ("bert on banking77", "bert on *")
_SIGNAL = partial(number, label="signal", layer=23)


def _from_start(metric: str, arm: str, **at: Any) -> tuple[Any, str, Any]:
    """A gain after training, its arm, and the gain at its start."""
    after, before = (number(metric, label=x, **at) for x in ("ratios", "ratios at the start"))
    return after, f"{arm} {GAINED}", before.of(f"{arm} {GAINED}")


# fmt: off
CLAIMS = (
    Claim("sas/propagation",
        "Without skips, shaped attention keeps tokens apart through 24 layers.", "", "signal",
        (lower("cosine of two tokens after 24 layers, SAS-P against no skip and no shaping",
            _SIGNAL("similarity"), "sas-p", "transformer · attention_skip none"),
        no_worse("cosine of two tokens after 24 layers, SAS-P against Pre-LN",
            _SIGNAL("similarity"), "sas-p", BASE),
        higher("effective rank of a text's tokens after 24 layers, SAS-P against no skip and no "
            "shaping", _SIGNAL("effective_rank"), "sas-p", "transformer · attention_skip none")),
        by_construction=True),
    Claim("sas/figure2", "Blocks without skips, as first published, train worse than Pre-LN.",
        "a gap at every step", "blocks",
        (higher("loss of V-SkipInit, 6 layers", _SHALLOW, ("skipless · shaping skipinit",
            "skipless, 2023", "skipless, 2023, 24 layers"), DEEP_ARMS[1]),)),
    Claim("sas/figure5", "SAS and SAS-P reach Pre-LN's loss in as many steps.",
        "1.178 (SAS) against 1.191", "blocks",
        (no_worse("loss of SAS, 6 layers", _SHALLOW, "sas", BASE, by=MARGIN),
        no_worse("loss of SAS-P, 6 layers", _SHALLOW, "sas-p", BASE, by=MARGIN),
        no_worse("loss of SAS-P, 24 layers", _24_LAYERS, *DEEP_ARMS, by=MARGIN))),
    Claim("sas/identity", "Identity values are no worse than trained ones.",
        "1.178 against 1.194", "blocks",
        (no_worse("loss with identity values against trained ones", _SHALLOW, "sas",
            ("sas · values reparametrised · projections reparametrised",
            "sas, trained values, β 1"), by=MARGIN),), also=("sas/figure3",)),
    Claim("sas/figure4", "Without attention's skip, trained values and projections return to the "
        "identity, but for the first layer's values.",
        "β/α goes from 0.2 to 0 in 43,000 steps; in the first layer's values it stays above 0.05",
        "ratios",
        (ratio("all but the first layer's values: mean |β/α| as a share of its start, 0.2 (at most "
            "0.25)", *_from_start("beta_over_alpha", "sas"), at_most=0.25),
        ratio("the first layer's values: |β/α| as a share of its start, 0.2 (at least 0.25)",
            *_from_start("beta_over_alpha_values", "sas", layer=0), at_least=0.25))),
    Claim("sas/figure22",
        "With the skip (Pre-LN), trained values and projections leave the identity.",
        "β/α grows", "ratios",
        (higher("mean β/α of all but the first layer's values, Pre-LN after training against its "
            "start", *_from_start("beta_over_alpha", BASE)),
        higher("mean β/α of all but the first layer's values, Pre-LN against SAS", _BETA,
            f"{BASE} {GAINED}", f"sas {GAINED}"))),
    Claim("sas/residual", "A small gain of the MLP branch is better than a gain of 1.",
        "0.1 better than 0.3 and 1", "blocks",
        (lower("loss with the gain by depth against gain 1", _SHALLOW, "sas",
            ("sas · mlp_gain 1.0", "sas, β_FF 1")),), also=("sas/figure13",)),
    Claim("sas/depth", "Shaped blocks train in deep models, and lead after three times the tokens.",
        "Pre-LN, SAS and SAS-P level at 72 layers", "depth",
        (no_worse("loss of SAS-P in the deep model", _24_LAYERS, *DEEP_ARMS, by=MARGIN),
        lower("loss of SAS-P after the long run", replace(LOSS, label="* layers for longer"),
            "sas-p", BASE)), also=("sas/figure6", "sas/figure8")),
    Claim("sas/languini", "Simplified blocks keep up with Pre-LN on other text (Languini books).",
        "", "blocks-books",
        tuple(no_worse(f"loss of {arm.upper()} on books", replace(LOSS, label="*books"), arm, BASE,
            by=MARGIN) for arm in ("sas", "sas-p"))),
    Claim("sas/scaling", "The lead of simplified blocks shrinks as models and tokens grow.",
        "", "blocks-scaling",
        (lower("loss of Pre-LN less SAS-P's, the widest model against the narrowest", LOSS,
            _WIDE, _NARROW, Gate(_NARROW, 0.02, "the lead compared with")),)),
    Claim("sas/longer", "Ours: the lead of SAS survives ten and twenty tokens a parameter.",
        "", "blocks-longer",
        tuple(lower(f"loss after {many} tokens a parameter", replace(LOSS, label=f"{many} tokens*"),
            "sas", BASE) for many in ("ten", "twenty"))),
    Claim("sas/bert", "Crammed BERTs of simplified blocks keep the loss of hidden tokens.",
        "80.0 against 80.4 on GLUE after a day", "encoders",
        (no_worse("loss at hidden tokens", number("masked loss", times=1), "bert-sas-p", "bert",
            by=0.05),), also=("sas/figure7",)),
    Claim("sas/glue", "Crammed BERTs of simplified blocks keep the score after fine-tuning (GLUE; "
        "here Banking-77).", "80.0 against 80.4", "encoders",
        tuple(no_worse(f"accuracy of {arm.upper()} after fine-tuning", number("accuracy"),
            (f"bert-{arm} on banking77", f"bert-{arm} on *"), _TUNED, least=0.6, by=0.02,
            better="higher")
            for arm in ("sas", "sas-p")), also=("sas/table2",)),
    Claim("sas/table1", "SAS-P trains faster than Pre-LN.",
        "1.16 × the throughput, with 15 % fewer parameters", "speed",
        (ratio("tokens a second of SAS-P against the baseline's, on the record's device",
            number("tokens_per_second", label="speed"), "sas-p", BASE),)),
    Claim("sas/outliers", "Ours: simplified blocks have no larger outliers.", "", "blocks",
        tuple(no_worse(f"kurtosis of the hidden states, SAS-P, {layers} layers",
            number("kurtosis", label=loss.label), *DEEP_ARMS, by=1)
            for layers, loss in ((6, _SHALLOW), (24, _24_LAYERS)))),
)
# fmt: on
