"""docs/log.md: its numbers are those of the committed records."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Records
from clearhead.report import page_of
from clearhead.report.costs import add_costs
from clearhead.report.statistics import compare

ROOT = Path(__file__).parents[2]
PAGE = " ".join(ROOT.joinpath("docs/log.md").read_text("utf-8").split())
SECTIONS = PAGE.split(" ### ")
NUMBER = r"[−+]?\d[\d,.]*"
FIRST, REST = {"tokens": "first"}, {"tokens": "rest"}
LOSS = {"metric": "loss", "length": 128, "task": None}
ON_FIRST = {"metric": "first_token_argmax_share", "map": "softmax"}
OPENING = {"at": "documents"}
COARSE = {"added": "w8a8-coarse"}
T, S = "transformer", "sas · values reparametrised · projections reparametrised · value_gain 0.2"
SHARED = f"{T} · orthoadam · rotation_share size"


def kurtosis(tokens: dict[str, str], **asked: Any) -> dict[str, Any]:
    return {"metric": "kurtosis", **tokens, **asked}


def perplexity(length: int, **asked: Any) -> dict[str, Any]:
    return {"metric": "perplexity", "length": length, "task": "perplexity", **asked}


def passkey(length: int) -> dict[str, Any]:
    return {"metric": "accuracy", "task": "passkey", "scaling": "none", "length": length}


# A record and label, the number asked (the page shows 100 times it under "%"), and what the page
# shows of arms: "mean ± deviation" over seeds, or of "arm − arm" Welch's "mean (low to high)".
SHOWN: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("outliers-long", "outliers", LOSS, {T: "3.082 ± 0.042", f"{T} · orthoadam": "3.145 ± 0.044"}),
    (
        *("outliers-long", "outliers", kurtosis(FIRST)),
        {T: "9.57 ± 0.54", f"{T} · orthoadam": "2.88 ± 0.05"},
    ),
    (
        *("outliers-long", "outliers", {"metric": "kurtosis_rotated", **FIRST}),
        {f"{T} · orthoadam": "3.89 ± 0.19", SHARED: "5.84 ± 0.85"},
    ),
    (
        *("outliers-long", "outliers", {"metric": "added_perplexity", "scheme": "w8a8-coarse"}),
        {T: "0.051 ± 0.019", f"{T} · orthoadam": "0.027 ± 0.010"},
    ),
    (
        *("outliers", "outliers", LOSS),
        {
            T: "4.219 ± 0.029",
            f"{T} · orthoadam": "4.222 ± 0.026",
            f"{T} · normalizer softmax1": "4.231 ± 0.035",
            f"{T} · normalizer softmax1 · orthoadam": "4.297 ± 0.137",
            f"{T} · epilogue gate": "4.109 ± 0.023",
            f"{T} · qk_norm rmsnorm": "4.214 ± 0.024",
            f"{T} · muon": "3.773 ± 0.025",
        },
    ),
    ("ratios", "ratios", {"metric": "beta_over_alpha"}, {S: "0.038 ± 0.003"}),
    ("ratios", "ratios", {"metric": "beta_over_alpha_values", "layer": 0}, {S: "0.128 ± 0.010"}),
    (
        *("sas-encoders", "encoders", {"metric": "masked loss"}),
        {"bert-sas-p": "5.858 ± 0.007", "bert": "5.916 ± 0.006"},
    ),
    (
        *("encoders-banking", "encoders", {"metric": "accuracy", "%": True}),
        {
            "bert-sas on banking77": "88.5 ± 0.4 %",
            "bert-sas-p on banking77": "88.5 ± 0.2 %",
            "bert on banking77": "83.4 ± 0.8 %",
        },
    ),
    (
        *("coca-encoders", "encoders", {"metric": "masked loss"}),
        {"bert · position rope": "4.303 ± 0.017"},
    ),
    (
        *("coca-order", "long context", perplexity(2048, scaling="none")),
        {T: "49.1 ± 1.5", "coca": "36.2 ± 0.4"},
    ),
    (
        *("coca-order", "long context", perplexity(1024, scaling="dynamic", factor=8.0)),
        {T: "30.6 ± 1.1", "coca": "30.9 ± 0.6"},
    ),
    (
        *("differential-ablations", "differential ablations", LOSS),
        {
            T: "3.145 ± 0.011",
            "differential": "3.291 ± 0.005",
            "differential · head_norm none − differential": "−0.167 (−0.193 to −0.140)",
            "differential · lambda_init 0.8 − differential": "−0.121 (−0.173 to −0.070)",
            "differential · lambda_init 0.5 − differential": "+0.040 (0.025 to 0.055)",
        },
    ),
    (
        *("differential", "differential", LOSS),
        {T: "3.151 ± 0.009", "differential": "3.304 ± 0.010", "differential-v2": "3.108 ± 0.020"},
    ),
    (
        *("differential-scaling", "width 128", LOSS),
        {"differential − transformer": "0.34 (0.28 to 0.41)"},
    ),
    (
        *("blocks-books", "6 layers, books", LOSS),
        {
            T: "4.613 ± 0.010",
            "sas-p": "4.201 ± 0.015",
            "sas − transformer": "−0.447 (−0.477 to −0.417)",
        },
    ),
    ("depth", "24 layers", LOSS, {"sas-p − transformer": "−0.59 (−0.81 to −0.37)"}),
    ("depth", "6 layers for longer", LOSS, {"sas-p − transformer": "−0.292 (−0.336 to −0.247)"}),
    (
        *("blocks-longer", "ten tokens a parameter", LOSS),
        {"sas − transformer": "+0.09 (−0.15 to 0.33)"},
    ),
    ("schedules", "6 layers", LOSS, {"sas · shaping annealed − sas": "0.30 (0.08 to 0.52)"}),
    ("outliers-deep", "deep outliers", kurtosis(FIRST), {T: "2.36 ± 0.05", "sas-p": "2.68 ± 0.09"}),
    ("outliers-deep", "deep outliers", LOSS, {"sas-p": "4.44 ± 0.02"}),
    ("sink-text", "sink on text", LOSS, {T: "4.85 ± 0.06", "softmax1": "5.01 ± 0.10"}),
    (
        *("optimizers-short", "optimizers", LOSS),
        {f"{T} · adafactor": "4.013 ± 0.003", f"{T} · muon": "4.036 ± 0.037"},
    ),
    (
        *("forget", "", LOSS),
        {T: "4.535 ± 0.020", "alibi": "4.519 ± 0.012", "forget": "4.378 ± 0.009"},
    ),
    (
        *("elimination", "elimination", {**ON_FIRST, **OPENING, "%": True}),
        {
            T: "41.1 ± 2.6 %",
            f"{T} · position none": "46.0 ± 7.1",
            f"{T} · norm layernorm": "48.8 ± 4.7",
            f"{T} · bias true": "49.7 ± 2.6",
            f"{T} · mlp relu": "52.7 ± 2.8",
        },
    ),
    (
        *("sink", "backcopy", {**ON_FIRST, **OPENING, "%": True}),
        {"softmax1": "46.6 ± 6.9", "gated": "45.9 ± 5.1", "xsa": "26.0 ± 0.2"},
    ),
    ("sink", "backcopy", LOSS, {"softmax1 − transformer": "−0.0006 (−0.0019 to 0.0008"}),
    ("backcopy", "backcopy", LOSS, {"softmax1 − transformer": "+0.127 (0.011 to 0.242)"}),
    (
        *("backcopy-diagnoses", "", {**ON_FIRST, "%": True}),
        {T: "44.8 ± 4.8 %", "softmax1": "51.8 ± 5.7 %"},
    ),
    (
        *("signal-starts", "signal", {"metric": "similarity", "layer": 23}),
        {"sas-p": "0.029 ± 0.013", T: "0.708 ± 0.030"},
    ),
    ("passkey", "", passkey(256), {T: "0.233 ± 0.17", "coca": "0.0333 ± 0.033"}),
    ("passkey", "", passkey(2048), {"alibi": "0.356 ± 0.13"}),
    (
        *("passkey", "", perplexity(2048, scaling="none")),
        {T: "76.5 ± 3.5", "alibi": "44.3 ± 0.7", "coca": "65 ± 1.7", "differential": "102 ± 11"},
    ),
    (
        *("long-context", "", perplexity(2048, scaling="none")),
        {
            T: "139.9 ± 6.1",
            "alibi": "63.0 ± 0.2",
            "coca": "96.1 ± 2.4",
            "coca-slack": "103.8 ± 1.4",
        },
    ),
    (
        *("blocks", "6 layers", LOSS),
        {
            T: "2.533 ± 0.022",
            "skipless": "2.942 ± 0.141",
            "skipless, 2023": "3.235 ± 0.004",
            "sas, trained values, β 1": "2.436 ± 0.008",
            "sas − transformer": "−0.088 (−0.139 to −0.037)",
            "sas-p − transformer": "−0.084 (−0.130 to −0.039)",
        },
    ),
    (
        *("blocks", "24 layers", LOSS),
        {
            "transformer, 24 layers": "3.121 ± 0.035",
            "parallel at 2e-3, 24 layers": "3.088 ± 0.065",
            "sas, 24 layers − transformer, 24 layers": "−0.570 (−0.643 to −0.497)",
            "sas-p, 24 layers − transformer, 24 layers": "−0.562 (−0.634 to −0.489)",
        },
    ),
    (
        *("blocks", "24 layers", kurtosis(FIRST)),
        {"sas-p, 24 layers": "121.5 ± 13.4", "sas, 24 layers": "103.7 ± 48.8"},
    ),
    (
        *("orthoadam", "two optimizers, 2 M tokens", kurtosis(FIRST)),
        {f"{T} · adamw": "8.7 ± 1.9", SHARED: "2.75 ± 0.09"},
    ),
    (
        *("orthoadam", "two optimizers, 2 M tokens", LOSS),
        {
            f"{T} · adamw": "3.423 ± 0.013",
            SHARED: "3.426 ± 0.018",
            "softmax1 · adamw − transformer · adamw": "+0.046 (0.009 to 0.083",
        },
    ),
    (
        *("tiny-long", "longer record, 2.5 M tokens", {"metric": "perplexity", "length": 2048}),
        {T: "69.1 ± 3.1", "differential": "95.3 ± 10.8", "softmax1": "72.4 ± 3.7"},
    ),
    ("composition", "composition", LOSS, {"clearhead − transformer": "−0.61 (−0.75 to −0.47)"}),
    (
        *("speed", "speed", {"metric": "tokens_per_second"}),
        {"clearhead": "7,477 ± 652", T: "8,592 ± 431"},
    ),
    (
        *("retrofit-seeds", "retrofit", COARSE),
        {
            "dense": "+85.6 ± 2.6 %",
            "attention only": "+92.3 ± 3.2 %",
            "lora": "+82.5 ± 2.7 %",
            "differential-v2": "+87.0 ± 2.4 %",
            "gated": "+87.9 ± 3.8 %",
            "softmax1 annealed": "+68.8 ± 7.7 %",
            "key-value trained": "+22.5 ± 1.0 %",
            "prefix rotated trained": "+4.73 ± 1.46 %",
            "searched turned learned": "+0.87 ± 0.25 %",
            "searched turned learned trained": "+0.87 ± 0.21 %",
        },
    ),
    ("retrofit-1m", "retrofit", COARSE, {"dense": "+68.4 ± 1.4 %"}),
    (
        *("retrofit-1m", "retrofit", {"metric": "perplexity", "task": "perplexity"}),
        {"dense": "10.27 ± 0.06", "searched turned learned trained": "10.81 ± 0.11"},
    ),
]


def by_seed(records: Records, arm: str, asked: dict[str, Any]) -> Iterator[float]:
    """A number a seed: the final one, and its mean where it has several."""
    asked = dict(asked)
    scheme, scale = asked.pop("added", None), 100 if asked.pop("%", False) else 1
    for run in records.of(arm):
        add_costs(run)
        if scheme:
            few, full = run.value("perplexity", scheme=scheme), run.value("perplexity")
            assert few is not None
            assert full is not None
            yield 100 * (few / full - 1)
            continue
        overall: dict[str, Any] = {"step": None, "layer": None, "head": None, **asked}
        values = [one.value for one in run.select(**overall) if one.value is not None]
        if values:
            yield scale * fmean(values)


def near(shown: str, value: float) -> bool:
    """Rounded to the digits shown, either way at a half."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "").replace("−", "-")) - value) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize(
    ("name", "label", "asked", "arms"),
    SHOWN,
    ids=[f"{name}-{asked.get('metric', 'added')}" for name, _, asked, _ in SHOWN],
)
def test_a_paragraph_has_the_numbers_of_its_record(
    name: str, label: str, asked: dict[str, Any], arms: dict[str, str]
) -> None:
    records = load(ROOT / "results" / f"{name}.jsonl").labelled(label)
    sections = [text for text in SECTIONS if f"{name}.jsonl`" in text]
    for arm, shown in arms.items():
        assert any(shown in text for text in sections), shown
        values = [list(by_seed(records, one, asked)) for one in arm.split(" − ")]
        expected = [fmean(values[0]), stdev(values[0])]
        if len(values) == 2:
            difference = compare(values[0], values[1])
            assert difference is not None
            assert difference.interval is not None
            expected = [difference.mean, *difference.interval]
        numbers = re.findall(NUMBER, shown)
        assert all(near(*pair) for pair in zip(numbers, expected, strict=True)), (arm, expected)


SURVIVING = re.findall(r"\b(\d+)\s+of\s+(\d+)\s+in\s+`([\w-]+).jsonl`", PAGE)


@pytest.mark.parametrize("found", SURVIVING, ids=lambda found: found[2])
def test_so_many_comparisons_survive_as_the_page_says(found: tuple[str, str, str]) -> None:
    survive, made, name = found
    account = page_of(load(ROOT / "results" / f"{name}.jsonl")).account
    assert account.startswith(f"Comparisons on this page: {made}. ")
    assert account.endswith(f": {survive}.")


def test_the_page_counts_comparisons_of_several_records() -> None:
    assert len(SURVIVING) == 7


def test_64_windows_are_those_of_the_record() -> None:
    runs = {run.header["run"]: run for run in load(ROOT / "results/trained-64.jsonl").runs}
    names = ("trained-0", "trained-1", "trained-2", "trained-lower-0", "dense-0")
    added = []
    for run in map(runs.get, names):
        assert run is not None
        few, full = run.value("perplexity", scheme="w8a8-coarse"), run.value("perplexity")
        assert few is not None
        assert full is not None
        added.append(f"+{100 * (few / full - 1):.2f}")
    three = f"{added[0]}, {added[1]} and {added[2]} %, the model at the lower rate {added[3]} %"
    assert f"8 bits cost the three seeds {three}, dense continuation {added[4]} %" in PAGE


def test_the_prefixes_are_those_of_the_searches() -> None:
    searches = json.loads(ROOT.joinpath("results/prefix-search.json").read_text("utf-8"))
    train, validation = (
        {one["text"]: one["fails"] for one in search["prefix"]["tried"]} for search in searches
    )
    counts = f'a newline fails on {train[chr(10)]}, " the" on {train[" the"]}, "." on {train["."]},'
    assert f"on books-train {counts}" in PAGE
    assert (train[" a,"], validation["\n in"]) == (0, 0)
    for search in searches:
        plain, *tried = search["prefix"]["tried"]
        assert plain["fails"] == plain["pieces"] == 64
        assert all(one["fails"] for one in tried if len(one["tokens"]) == 1)
