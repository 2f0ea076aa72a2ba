"""docs/findings.md: the numbers in its tables are those of the committed records."""

import re
from statistics import fmean, stdev
from typing import Any

import pytest

from clearhead.records.loading import load

from .findings import FIRST, LOSS, REST, ROOT, by_seed, cells, near

OPENING = {"at": "documents", "map": "softmax"}
OUTLIERS = {
    "AdamW": "transformer",
    "OrthoAdam, a rotation a parameter": "transformer · orthoadam",
    "OrthoAdam, a rotation a size": "transformer · orthoadam · rotation_share size",
    "softmax-1": "transformer · normalizer softmax1",
    "softmax-1 and OrthoAdam": "transformer · normalizer softmax1 · orthoadam",
    "Muon": "transformer · muon",
    "a gate (7 % more parameters)": "transformer · epilogue gate",
    "normed queries and keys": "transformer · qk_norm rmsnorm",
}
OPTIMIZERS = {
    "AdamW": "transformer",
    "OrthoAdam, one rotation for all axes of a size": (
        "transformer · orthoadam · rotation_share size"
    ),
    **{
        name: f"transformer · {name.lower()}"
        for name in ("OrthoAdam", "RMSprop", "Adafactor", "Muon", "SGD")
    },
}
GAIN = "beta_over_alpha"
REPARAMETRISED = "values reparametrised · projections reparametrised · value_gain 0.2"
DEEP = {
    f"{block}, {name}": arm + changes
    for block, arm in (("Pre-LN", "transformer"), ("SAS-P", "sas-p"))
    for name, changes in (
        ("AdamW", ""),
        ("OrthoAdam by parameter", " · orthoadam"),
        ("OrthoAdam by size", " · orthoadam · rotation_share size"),
    )
}
ELIMINATION = {
    "`transformer`": "",
    "no positions": " · position none",
    "learned positions": " · position learned",
    "biases": " · bias true",
    "LayerNorm": " · norm layernorm",
    "RMSNorm of one gain": " · norm rmsnorm-single",
    "ReLU MLP": " · mlp relu",
    "norms of queries and keys": " · qk_norm rmsnorm",
    "softmax-1": " · normalizer softmax1",
    "weight decay 0.5": " · weight_decay 0.5",
    "OrthoAdam": " · orthoadam",
}
DEPTH = {
    f"`{name}`": f"{name}, 24 layers" for name in ("transformer", "skipless", "sas", "sas-p")
} | {"`skipless`, 2023": "skipless, 2023, 24 layers"}
VARIANTS = {
    "`transformer` (Pre-LN)": "transformer",
    **{f"`{name}`": name for name in ("parallel", "sas", "sas-p", "sas-p-nonorm")},
    "`skipless` (V-SkipInit as released, shaped)": "skipless",
    "`skipless`, α I + β A (2023)": "skipless, 2023",
    "`sas`, trained values W = I + ΔW": "sas, trained values, β 1",
    "`sas`, W = I + 0.2 ΔW": "sas, trained values, β 0.2",
    "`sas`, β_FF 0.05 (the rule gives 0.17)": "sas, β_FF 0.05",
}
BLOCKS = {
    "loss": LOSS,
    "kurtosis, first token": {"metric": "kurtosis", **FIRST},
    "the rest": {"metric": "kurtosis", **REST},
}
STREAM = {
    "loss, nats": LOSS,
    "kurtosis, first token": {"metric": "kurtosis", **FIRST},
    "kurtosis, rest": {"metric": "kurtosis", **REST},
}
ABLATIONS = {
    "baseline, 16 heads": "transformer",
    "baseline, 8 heads": "transformer · num_attention_heads 8",
    "V1": "differential",
    "V1 without the norm of each head": "differential · head_norm none",
    "V1, λ starts at 0.5 in all layers": "differential · lambda_init 0.5",
    "V1, λ starts at 0.8 in all layers": "differential · lambda_init 0.8",
    "V1, 4 pairs twice as wide": "differential · num_attention_heads 8",
}
LENGTHS = (128, 256, 512, 1024, 2048)


def _lengths(**asked: Any) -> dict[str, dict[str, Any]]:
    return {f"{length:,}": {**asked, "length": length} for length in LENGTHS}


PASSKEY = {"task": "passkey", "scaling": "none"}
BITS = {
    name: {"metric": "added_perplexity", "scheme": scheme}
    for name, scheme in {
        "`w8a8-coarse`": "w8a8-coarse",
        "after a rotation": "hadamard-w8a8-coarse",
        "`w4-channel`": "w4-channel",
        "after a rotation, 4 bits": "hadamard-w4-channel",
        "`mxfp4`": "mxfp4",
        "after a rotation, `mxfp4`": "hadamard-mxfp4",
    }.items()
}
# How a table begins → its record and label, the arms of its rows, the numbers of its columns.
TABLES: dict[str, tuple[str, str, dict[str, str], dict[str, dict[str, Any]]]] = {
    "| | loss, nats | kurtosis beyond": (
        "outliers",
        "outliers",
        OUTLIERS,
        {
            "loss, nats": LOSS,
            "kurtosis beyond the first token": {"metric": "kurtosis", **REST},
            "in the optimizer's basis": {"metric": "kurtosis_rotated", **REST},
            "added perplexity, `w8a8-coarse`": {
                "metric": "added_perplexity",
                "scheme": "w8a8-coarse",
            },
            "the same, `w4-channel`": {"metric": "added_perplexity", "scheme": "w4-channel"},
        },
    ),
    "| perplexity added after 0.4 M tokens |": ("outliers", "outliers", OUTLIERS, BITS),
    "| perplexity added after 2 M tokens |": ("outliers-long", "outliers", OPTIMIZERS, BITS),
    "| | rate | loss, nats | minus V1's": (
        "differential-ablations",
        "differential ablations",
        ABLATIONS,
        {
            "loss, nats": LOSS,
            "kurtosis beyond the first token": {"metric": "kurtosis", **REST},
        },
    ),
    "| | loss, nats | ARC-challenge |": (
        "abilities",
        "abilities",
        {"baseline": "transformer", "V1": "differential"},
        {
            "loss, nats": LOSS,
            "ARC-challenge": {"metric": "acc", "task": "arc_challenge"},
            "ARC-easy": {"metric": "acc", "task": "arc_easy"},
            "BoolQ": {"metric": "acc", "task": "boolq"},
            "HellaSwag": {"metric": "acc", "task": "hellaswag"},
            "WinoGrande": {"metric": "acc", "task": "winogrande"},
            "mean of the five": {"metric": "acc"},
            "Banking-77": {"metric": "accuracy", "task": "shots", "order": "random"},
            "names not in the document": {"metric": "unsupported_names"},
            "by chance": {"metric": "unsupported_names_by_chance"},
        },
    ),
    "| perplexity on six files of code |": (
        "coca-order",
        "long context",
        {"RoPE": "transformer", "CoCA": "coca"},
        _lengths(metric="perplexity", task="perplexity", scaling="none"),
    ),
    "| after 2 M tokens | rate |": (
        "outliers-long",
        "outliers",
        OPTIMIZERS,
        STREAM
        | {
            "in the optimizer's basis, first": {"metric": "kurtosis_rotated", **FIRST},
            "in the optimizer's basis, rest": {"metric": "kurtosis_rotated", **REST},
        },
    ),
    "| optimizer | rate |": (
        "optimizers-short",
        "optimizers",
        OPTIMIZERS,
        STREAM
        | {
            "largest activation, first token": {"metric": "largest_activation", **FIRST},
        },
    ),
    "| block | first layer's values |": (
        "ratios",
        "ratios",
        {
            "SAS, without the skip": f"sas · {REPARAMETRISED}",
            "Pre-LN, with the skip": f"transformer · {REPARAMETRISED}",
        },
        {
            "first layer's values": {"metric": f"{GAIN}_values", "layer": 0},
            "mean of all others, values and projections": {"metric": GAIN},
            "third layer's values": {"metric": f"{GAIN}_values", "layer": 2},
            "last layer's values": {"metric": f"{GAIN}_values", "layer": 5},
            "last layer's projections": {"metric": f"{GAIN}_projections", "layer": 5},
            "loss, nats": LOSS,
        },
    ),
    "| encoder | pretraining rate |": (
        "encoders-banking",
        "encoders",
        {},
        {
            "loss at hidden tokens, nats": {"metric": "masked loss"},
            "hidden tokens named, %": {"metric": "masked accuracy"},
            "Banking-77, % right": {"metric": "accuracy", "on": " on banking77"},
            "kurtosis, first token": {"metric": "kurtosis", **FIRST},
            "kurtosis, rest": {"metric": "kurtosis", **REST},
        },
    ),
    "| encoder | rate |": (
        "sas-encoders",
        "encoders",
        {},
        {
            "loss at hidden tokens, nats": {"metric": "masked loss"},
            "hidden tokens named, %": {"metric": "masked accuracy"},
            "kurtosis, first token": {"metric": "kurtosis", **FIRST},
            "kurtosis, rest": {"metric": "kurtosis", **REST},
            "largest activation, rest": {"metric": "largest_activation", **REST},
        },
    ),
    "| | rate | loss, nats | kurtosis, first": (
        "outliers-deep",
        "deep outliers",
        DEEP,
        {
            "loss, nats": LOSS,
            "kurtosis, first token": {"metric": "kurtosis", **FIRST},
            "kurtosis, others": {"metric": "kurtosis", **REST},
            "added perplexity, `w8a8-coarse`": BITS["`w8a8-coarse`"],
            "`w8a8-token`": {"metric": "added_perplexity", "scheme": "w8a8-token"},
            "`w4-channel`": BITS["`w4-channel`"],
            "`w3-channel`": {"metric": "added_perplexity", "scheme": "w3-channel"},
        },
    ),
    "| mean ± sd over seeds; in brackets": (
        "elimination",
        "elimination",
        {name: f"transformer{change}" for name, change in ELIMINATION.items()},
        {
            "largest weight on the first token, %": {
                "metric": "first_token_argmax_share",
                **OPENING,
            },
            "weight on it, %": {"metric": "first_token_mass", **OPENING},
            "loss, nats": LOSS,
            "kurtosis, first token": {"metric": "kurtosis", "at": "documents", **FIRST},
        },
    ),
    "| mean ± sd over seeds | largest weight": (
        "sink",
        "backcopy",
        {},
        {
            "largest weight on the first token, %": {
                "metric": "first_token_argmax_share",
                **OPENING,
            },
            "weight on it, %": {"metric": "first_token_mass", **OPENING},
            "weight on no key, %": {"metric": "null_mass", **OPENING, "position": None},
            "loss, nats": LOSS,
        },
    ),
    "| 6 layers | rate |": (
        "blocks",
        "6 layers",
        VARIANTS,
        BLOCKS | {"loss, mean ± sd": LOSS},
    ),
    "| 24 layers | rate |": ("blocks", "24 layers", DEPTH, BLOCKS),
    "| share of keys named in full": ("passkey", "", {}, _lengths(metric="accuracy", **PASSKEY)),
    "| share of the keys' tokens right": (
        "passkey",
        "",
        {},
        _lengths(metric="forced_tokens", **PASSKEY),
    ),
    "| perplexity, no scaling | 128 | 256 | 512 | 1,024 | 2,048 |\n| --- | --- | --- | --- | --- "
    "| --- |\n| `transformer` |": (
        "passkey",
        "",
        {},
        _lengths(metric="perplexity", task="perplexity", scaling="none"),
    ),
    "| perplexity, no scaling | 128 | 256 | 512 | 1,024 | 2,048 |\n| --- | --- | --- | --- | --- "
    "| --- |\n| `transformer` (RoPE)": (
        "long-context",
        "",
        {"`transformer` (RoPE)": "transformer", "`coca` (exact)": "coca"},
        _lengths(metric="perplexity", task="perplexity", scaling="none"),
    ),
}


@pytest.mark.parametrize("start", TABLES, ids=lambda start: " ".join(start.split())[:40])
def test_a_table_has_the_numbers_of_its_record(start: str) -> None:
    name, label, arms, columns = TABLES[start]
    records = load(ROOT / "results" / f"{name}.jsonl").labelled(label)
    checked, faults = 0, []
    for row, column, text in cells(start):
        found = re.match(r"\**(−?[\d.,]*\d)(?: ± ([\d.]*\d))?", text)
        if column not in columns or not found or (arms and row not in arms):
            continue
        arm = arms.get(row, row.strip("`"))
        asked = dict(columns[column])
        numbers = by_seed(records, arm + asked.pop("on", ""), asked)
        if not numbers and arm not in records.arms():
            continue
        scale = 100 if "%" in column else 1
        mean, spread = found.groups()
        wrong = not near(mean, scale * fmean(numbers))
        if wrong or (spread and not near(spread, scale * stdev(numbers))):
            faults.append(f"{row}, {column}: {text}, not {[scale * one for one in numbers]}")
        checked += 1
    assert not faults
    assert checked >= 10
