"""A sceptic's recomputation: the pages say what the records do, by a reader of their own."""

import math
import re
from functools import cache
from pathlib import Path
from statistics import fmean, variance

import pytest
from scipy.stats import t

from .second_reader import (
    DEFINITIONS,
    Comparison,
    against,
    agree,
    numbers,
    of,
    parsed,
    table,
    together,
)

ROOT = Path(__file__).parents[2]
README, CLAIMS, BOOK = (
    ROOT.joinpath(name).read_text("utf-8")
    for name in ("README.md", "docs/claims.md", "results/comparisons.md")
)
# The comparisons in the table of repairs, by claim and place among the claim's: costs and gains.
TABLE = {
    "prefix and rotation, trained": (("retrofit/loss", 0), ("retrofit/controls", 0)),
    "ALiBi": (("position/alibi", 0), ("position/alibi", 1)),
    "CoCA, exact": (("coca/exact", 0), ("coca/table1", 1)),
    "SAS-P": (("sas/table1", 0), ("sas/figure5", 1)),
    "softmax-1": (("softmax1/loss", 0), ("softmax1/share", 0)),
    "OrthoAdam, shared": (("together/loss", 5), ("softmax1/kurtosis", 2)),
    "differential V1": (("diff/speed", 0), ("diff/table2", 0)),
    "differential V2": (("diff/speed", 1), ("diff/v2", 0)),
}
SINK = "first_token_argmax_share"


def tabled(text):
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def groups():
    """(claim, place) → words and rows of a comparison on the page."""
    found = {}
    for claim, text in re.findall(r"^### (\S+):.*\n((?:(?!^##).*\n)*)", BOOK, re.MULTILINE):
        place = -1
        for row in tabled(text)[2:]:
            place += bool(row[0])
            found.setdefault((claim, place), (row[0], []))[1].append(row)
    return found


def keys():
    """The claim of each definition, and its place among the comparisons of that claim."""
    claims = [line.partition("; ")[0] for line in DEFINITIONS]
    return [(claim, claims[:n].count(claim)) for n, claim in enumerate(claims)]


@cache
def recomputed():
    """(claim, place) → {(source, label): Comparison} and the bound of its test."""
    found = {}
    for key, line in zip(keys(), DEFINITIONS, strict=True):
        _, spec, arm, than, *bound = line.split("; ")
        than, _, other = than.partition(" :: ")
        metric, times, label, at = mine = parsed(spec)
        _, _, there, moved = parsed(f"{metric} {other}")
        theirs = numbers((metric, times, label if there == "*" else there, at | moved), than)
        apart = {"map", *(name for name in moved if moved[name] != at.get(name))}
        apart |= {"length"} if times else set()
        records = {}
        for (source, name), rows in numbers(mine, arm).items():
            beside = (source, there if there != "*" else name)
            if beside in theirs:
                one = Comparison(rows, theirs[beside], apart, spec.startswith("~"))
                records |= {(source, name): one} if all(one.seeds) else {}
        found[key] = records, float(bound[0]) if bound else 0.0
    return found


@cache
def pooled(key):
    """Mean and bounds over the records that the page counts."""
    _, rows = groups()[key]
    records, _ = recomputed()[key]
    chosen = [one for one in rows if ".jsonl" in one[1] and "not counted" not in one[5]]
    tested = [one for one in chosen if one[5].startswith("p = ")] or chosen
    ones = [records[place_of(one[1])] for one in tested]
    mean, bounds = together(sorted(ones, key=lambda one: -one.weight))
    return mean, *(bounds or ())


def place_of(record):
    """The file and the label of "file.jsonl, label"."""
    source, _, label = record.partition(", ")
    return source, label


@pytest.mark.parametrize("key", keys(), ids=lambda key: f"{key[0]} {key[1]}")
def test_a_comparison_of_the_claims_is_that_of_the_records(key):
    _, rows = groups()[key]
    records, bound = recomputed()[key]
    checked = 0
    for _, record, ours, theirs, shown, verdict in rows:
        if ".jsonl" not in record:
            if shown:
                checked += agree(shown, *pooled(key))
            continue
        one = records[place_of(record)]
        scale = one.means[1] if one.ratio else 1.0
        for text, values, mean in zip((ours, theirs), one.seeds, one.means, strict=True):
            spread = [math.sqrt(variance(values)) / scale] if "±" in text else []
            checked += agree(text, mean / scale, *spread)
        checked += agree(shown, one.mean, *(one.bounds or ()))
        if verdict.startswith("p = "):
            checked += agree(verdict[4:], one.p(bound))
    assert checked or "0 of 0" in rows[0][1]


def test_the_table_of_repairs_says_what_the_comparisons_do():
    pages = [
        tabled(text.partition("| repair |")[2].partition("\n\n")[0]) for text in (README, CLAIMS)
    ]
    assert pages[0] == pages[1][: len(pages[0])]
    lines = {row[0]: row[2:4] for row in pages[0]}
    checked = 0
    for name, places in TABLE.items():
        for key, cell in zip(places, lines.pop(name), strict=True):
            shown = cell.rpartition(": ")[2]
            missing = ": not counted: " in cell or key not in groups()
            checked += 0 if missing else agree(shown.partition(")")[0], *pooled(key))
    assert checked >= 36
    assert not {*lines} - {"---"}


def test_the_counts_of_verdicts_are_those_of_the_claims():
    verdicts = re.findall(r"^### \S+: (.*)$", BOOK, re.MULTILINE)
    names = ("holds", "does not hold", "undecided", "untested")
    total = re.search(r"^Of \d+ claims .*$", CLAIMS, re.MULTILINE)[0]
    agree(total, len(verdicts), *(verdicts.count(name) for name in names))


def costs(file, arm):
    """What 8 bits with one scale a tensor add, in per cent."""
    sides = [of(file, arm, one) for one in ("added_perplexity scheme=w8a8-coarse", "full")]
    return [100 * few / full for few, full in zip(*sides, strict=True)]


def spread(values):
    half = t.ppf(0.975, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values), fmean(values) - half, fmean(values) + half


ORTHOADAM = "orthoadam.jsonl", "two optimizers, 2 M tokens"
MADE = "elimination.jsonl", "elimination"
SMOLLM = "smollm2-diagnosis.jsonl", "SmolLM2-135M"
LEARNED, TRAINED = "prefix turned learned", "searched turned learned trained"
LONG, LOWER = "retrofit-1m.jsonl", "retrofit-1m-lower.jsonl"
LONGER, DIFF = "retrofit-250k*.jsonl", "differential-ablations.jsonl"
READING, CODE = "perplexity@16 task=perplexity scaling=none", "perplexity task=perplexity"
PASSKEY = "forced_tokens@16 task=passkey scaling=dynamic factor=4"
# Sentences of README, and their numbers.
CHECKS = {
    r"has (21 % more parameters \(162.8) M": lambda: [
        100 * (sizes("retrofit-seeds.jsonl", LEARNED) / sizes("retrofit-seeds.jsonl", "dense") - 1),
        sizes("retrofit-seeds.jsonl", LEARNED),
    ],
    r"(12 to 15 %) fewer": lambda: [
        100 * (1 - sizes("blocks.jsonl", arm) / sizes("blocks.jsonl", base))
        for arm, base in (("sas", "transformer"), ("sas-p, 24 layers", "transformer, 24 layers"))
    ],
    r"SAS-P by (0.084 nats \(.*?\))": lambda: less("sas/figure5", 1),
    r"undecided \(\+(0.09, .*?)\)": lambda: pooled(("sas/longer", 0)),
    r"it costs (1.2 of perplexity \(.*?\))": lambda: pooled(("coca/exact", 0)),
    r"than RoPE by (13 \(.*?\))": lambda: less("coca/table1", 2),
    r"kurtosis from (8.7 to [\d.]+) at": lambda: reversed(
        recomputed()["softmax1/kurtosis", 2][0][ORTHOADAM].means
    ),
    r"softmax \(\+(0.046, .*?)\)": lambda: one_record("softmax1/loss", ORTHOADAM),
    r"its own \((−0.0006, .*?), gen": lambda: one_record("softmax1/loss", MADE),
    r"V1 loses (0.153 nats \(.*?\))": lambda: pooled(("diff/figure3", 0)),
    r"lower by (0.032 \(.*?\))": lambda: less("diff/v2", 0),
    r"perplexity \+(90 %) as it is": lambda: costs("retrofit-eight.jsonl", "as it is"),
    r"as it is, \+(0.9 % \(.*?\))": lambda: spread(costs("retrofit-seeds.jsonl", LEARNED)),
    r"one draw: \+([\d.]+ %)": lambda: costs("learned-64.jsonl", "turned-learned"),
    r"([\d.]+ %) of queries": lambda: of(*SMOLLM, "first_token_argmax_share", 100),
    r"; chance ([\d.]+ %)": lambda: of(*SMOLLM, "chance_floor", 100),
    r"number: (\S+) ×": lambda: [of(*SMOLLM, "hidden_top_1")[0] / of(*SMOLLM, "hidden_median")[0]],
    r"Mean cosine …: ([\d.]+\d)": lambda: of(*SMOLLM, "similarity layer=29"),
    r"loses (0.74 ± [\d.]+) %": lambda: mean_and_deviation(costs(LONGER, TRAINED)),
    r"perplexity is then ([\d.]+ %) below": lambda: [-100 * apart(LONGER, "full")],
    r"on code ([\d.]+ %) below": lambda: [-100 * apart(LONGER, CODE)],
    r"it is ([\d.]+ %) above on code": lambda: [100 * apart(LONG, CODE)],
    r"a third of it ([\d.]+ %) below": lambda: [-100 * apart(LOWER, CODE)],
    r"RoPE's rises from (48 to [\d.]+);": lambda: [
        fmean(of("passkey.jsonl", "transformer", one))
        for one in (READING.replace("16", "1"), READING)
    ],
    r"retrieves (36 %) of passkeys": lambda: [
        fmean(of("passkey.jsonl", "alibi", "accuracy@16 task=passkey scaling=none", 100))
    ],
    r"times by (0.21 .*?\))": lambda: against(
        "passkey.jsonl", PASSKEY, "coca-slack", "transformer"
    ),
    r"difference is \+(0.024 \(.*?\))": lambda: against(
        DIFF, "loss@1", "differential · lambda_init 0.8", "transformer"
    ),
    r"the sink \((48 to 51 %) of the queries": lambda: [
        100 * fmean(of("retrofit-softmax1.jsonl", arm, SINK))
        for arm in ("softmax1 annealed", "dense")
    ],
}


def sizes(file, arm):
    """Millions of parameters."""
    rows = [*table()["full"], *table()["loss"]]
    found = {row["parameters"] for row in rows if (row["source"], row["arm"]) == (file, arm)}
    (only,) = found
    return only / 1e6


def less(*key):
    """How much lower it is."""
    mean, low, high = pooled(key)
    return -mean, -high, -low


def one_record(claim, place):
    one = recomputed()[claim, 0][0][place]
    return one.mean, *one.bounds


def mean_and_deviation(values):
    return fmean(values), math.sqrt(variance(values))


def apart(file, spec):
    """The converted and trained model's number against dense continuation's."""
    return fmean(of(file, TRAINED, spec)) / fmean(of(file, "dense", spec)) - 1


@pytest.mark.parametrize("sentence", CHECKS)
def test_a_sentence_of_the_readme_has_the_numbers_of_the_records(sentence):
    (shown,) = re.findall(sentence, " ".join(README.split()))
    agree(shown.replace(" %", ""), *CHECKS[sentence]())


# The run of each row of docs/repair.md, in the order of the rows, and its record of 8 windows.
CHOICES = {
    "SmolLM2-135M": "repair",
    "learned": "learned",
    "learned-down": "learned",
    "turned-learned": "learned",
    "searched-learned": "learned",
    "prefix": "repair",
    "key-value": "repair",
}


def _check(shown: str, file: str, name: str, scheme: str) -> None:
    """Compare the "+30.7 %" that few bits add with the record."""
    (few,), (full,) = (
        of(f"{file}.jsonl", name, x) for x in (f"perplexity scheme={scheme}", "full")
    )
    agree(*re.findall(r"\+([\d.]+) %", shown), 100 * (few / full - 1))


def test_the_table_of_what_to_choose():
    page = ROOT.joinpath("docs/repair.md").read_text("utf-8")
    head, _, *rows = page[page.index("| you want |") :].partition("\n\n")[0].split("\n")
    assert "| options of `convert` | 8 bits | 6 bits |" in head
    for row, (name, file) in zip(rows, CHOICES.items(), strict=True):
        eight, _, sixty_four = row.split("|")[3].partition(" (")  # of 64 windows
        _check(eight, file, name, "w8a8-coarse")
        _check(row.split("|")[4], file, name, "w8a6-token")
        if sixty_four:
            _check(sixty_four, "learned-64", name, "w8a8-coarse")
