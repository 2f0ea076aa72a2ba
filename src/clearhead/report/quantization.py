"""The page of a quantisation: what schemes cost, and bits against perplexity."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from statistics import fmean

from clearhead.errors import ClearheadError
from clearhead.records.runs import Records, Run
from clearhead.report import made, narrative, style
from clearhead.report.charts import Curves, Looks, Point, chart, points_of
from clearhead.report.costs import add_costs, all_noise, four_digits
from clearhead.report.page import Block, Page, Section, Title, section
from clearhead.report.pivots import (
    Entry,
    Heading,
    Pivot,
    Quantity,
    arm_headings,
    at,
    build,
    summary,
)
from clearhead.report.verdicts import verdict_in_words

ROTATED = "hadamard-"
CLOSE = 0.01  # of full precision's perplexity
FULL = "full"  # the tick of full precision
# Family -> (heading of its kind, what shares a scale).
KINDS = {
    "wa": "weights and activations, absmax",
    "w": "weights, zero-point",
    "logits": "attention logits, absmax",
    "mxfp4": "weights, four-bit floats",
}
SCALES = {
    "wa-coarse": "a scale a tensor, both",
    "wa-moderate": "a scale a channel of weights, a tensor of activations",
    "wa-fine": "a scale a channel, both; activations calibrated",
    "wa-token": "a scale a channel of weights, a token of activations",
    "w-tensor": "a scale a tensor",
    "w-channel": "a scale a channel",
    "w-group": "a scale 128 inputs of a channel",
    "mxfp4": "a power of two 32 inputs of a channel",
    "logits-tensor": "a scale a text and layer",
    "logits-head": "a scale a head",
    "logits-row": "a scale a query",
}


def check(records: Records) -> Records:
    """Refuse models without a result in full precision, beside which no other says anything."""
    for run in records.runs:
        if run.measure("perplexity") is None:
            raise ClearheadError(f"{run.id} has no result in full precision")
    return records


def page(records: Records, title: str) -> Page:
    """The page of one model, or of several side by side."""
    check(records)
    for run in records.runs:
        add_costs(run)
    built = Page(
        title=title,
        kicker="clearhead quantize",
        records=records,
        judge=lambda threshold: [_verdict(records, threshold)],
        warnings=[
            *narrative.warnings(records),
            *(f"{run.id}: {remark}." for run in records.runs for remark in remarks_on(run)),
        ],
    )
    more = ""
    if any(run.measure("accuracy") is not None for run in records.runs):
        asked = dict.fromkeys(
            _questions(run) for run in records.runs if run.header.get("questions")
        )
        more = (
            " Accuracy is the share of multiple-choice questions answered right, by the "
            "log-likelihood of the answers and, where the lm-evaluation-harness does so too, by "
            f"that divided by their characters: {'; '.join(asked)}."
        )
    return built.with_sections(
        _curves(records, built.looks),
        section("quantization.numbers", "", [results(records)], more),
        section("quantization.fewest", "", [fewest(records)]),
        made.section(
            records,
            "Linear layers only, or attention logits only; embeddings, the output matrix, norms "
            "and hidden states in full precision. One text at a time, so that no scale is shared "
            "between texts.",
        ),
    )


def kind_of(family: str) -> str:
    """The tensors that a family quantises, in words."""
    plain = family.removeprefix(ROTATED)
    kind = KINDS.get(plain.partition("-")[0], plain)
    return kind if plain == family else f"{kind}, rotated (Hadamard)"


def scale_of(family: str) -> str:
    """Granularity of a family's scales, in words."""
    family = family.removeprefix(ROTATED)
    kind, _, group = family.partition("w-group")
    if not kind and group:
        return f"a scale {group} inputs of a channel"
    return SCALES.get(family, family)


def schemes(records: Records) -> dict[str, str | None]:
    """{scheme: family} of all that any model was measured on, in order."""
    return {
        one.dimensions["scheme"]: one.details.get("family")
        for run in records.runs
        for one in run.select("perplexity")
        if "scheme" in one.dimensions
    }


def families(records: Records) -> dict[str, dict[int, str]]:
    """{family: {bits: scheme}}, most bits first, of those that any model has a perplexity in; in
    the order in which the first tried them."""
    schemed = [
        one
        for run in records.runs
        for one in run.select("perplexity")
        if "scheme" in one.dimensions and one.details.get("family") and one.details.get("bits")
    ]
    found: dict[str, dict[int, str]] = {}
    for one in sorted(schemed, key=lambda one: -one.details["bits"]):
        found.setdefault(one.details["family"], {})[one.details["bits"]] = one.dimensions["scheme"]
    measured = [one.details["family"] for one in schemed if one.value is not None]
    tried = dict.fromkeys(one.details["family"] for one in schemed)
    return {family: found[family] for family in tried if family in measured}


def results(records: Records) -> Pivot | None:
    """A row a scheme; for each model its perplexity, what the scheme adds, and accuracies."""
    rows: list[tuple[Heading, str | None]] = [(Heading(title=_unquantised(records)), None)]
    for scheme, family in schemes(records).items():
        group = "" if family is None else kind_of(family)
        note = "" if family is None else scale_of(family)
        rows.append((Heading(title=scheme, group=group, note=note), scheme))
    reference = next(iter(records.arms()), "")
    columns = [
        (Heading(title=title, group=arm, arm=arm), (arm, metric))
        for arm in records.arms()
        for metric, title in (
            ("cost", "cost in perplexity"),
            ("accuracy", "accuracy"),
            ("accuracy_normalised", "by length"),
            ("bytes", "bytes"),
            ("tokens_per_second", "tokens/s"),
        )
    ]

    def fill(scheme: str | None, column: tuple[str, str]) -> tuple[Entry, ...]:
        arm, metric = column
        write = _WRITTEN.get(metric, style.percent)
        quantity = Quantity("", read=at(metric, scheme=scheme), write=write)
        entries = replace(quantity, judged=metric not in _WRITTEN).entries(records, arm, reference)
        if metric != "cost":
            return entries
        if entries and all_noise(records, arm, str(scheme)):
            entries = tuple(replace(one, text=f"{one.text}, noise") for one in entries)
        read = Quantity("", read=at("perplexity", scheme=scheme), write=four_digits, judged=False)
        found = read.entries(records, arm, reference)
        return (*entries, *(replace(one, name="perplexity") for one in found))

    return build("cost of schemes", rows, columns, fill, corner="scheme")


def _unquantised(records: Records) -> str:
    """Name of what schemes are compared with. Saved models are compared with bfloat16."""
    saved = any(run.measure("bytes") is not None for run in records.runs)
    return "bfloat16" if saved else "full precision"


_WRITTEN: dict[str, Callable[[float], str]] = {
    "bytes": "{:,.0f}".format,
    "tokens_per_second": four_digits,
}


def fewest_bits(run: Run, bits: dict[int, str]) -> int | None:
    """The fewest bits measured at which, and above which, perplexity is within `CLOSE` of full
    precision; None where there are none."""
    most = (run.value("perplexity") or -math.inf) * (1 + CLOSE)
    measures = {n: run.measure("perplexity", scheme=scheme) for n, scheme in bits.items()}
    tried = [(n, one.value) for n, one in measures.items() if one is not None]
    close = takewhile(lambda one: one[1] is not None and one[1] <= most, tried)
    return min((n for n, _ in close), default=None)


def fewest(records: Records) -> Pivot | None:
    """A row a family, a column a model."""
    rows = [
        (Heading(title=scale_of(family), group=kind_of(family)), bits)
        for family, bits in families(records).items()
    ]

    def fill(bits: dict[int, str], arm: str) -> tuple[Entry, ...]:
        words = []
        for run in records.of(arm):
            tried = [
                n for n, one in bits.items() if run.value("perplexity", scheme=one) is not None
            ]
            if tried:
                few = fewest_bits(run, bits)
                words.append(str(few) if few else f"more than {max(tried)}")
        distinct = list(dict.fromkeys(words))
        return (Entry(text=" or ".join(distinct)),) if distinct else ()

    return build(
        f"fewest bits within {CLOSE * 100:g} %",
        rows,
        arm_headings(records),
        fill,
        corner="what is quantised",
    )


def _verdict(records: Records, threshold: float) -> str:
    """Of two models who loses less and by how much; the dearest and the cheapest scheme of all."""
    arms, text = records.arms(), narrative.text_in_words(records)
    costs: dict[str, dict[str, float]] = {}
    for scheme in schemes(records):
        values = {arm: records.values(arm, "cost", scheme=scheme).values() for arm in arms}
        if all(values.values()):
            costs[scheme] = {arm: fmean(ones) for arm, ones in values.items()}
    if not costs:
        what = f"Perplexity{text} in {_unquantised(records)}"
        said = narrative.answer(records, what, at("perplexity"), four_digits)
        return said or "No perplexity could be measured in full precision."
    ends = [pick(costs, key=lambda one: max(costs[one].values())) for pick in (max, min)]
    sentences = [_less(records, costs, threshold)] if len(arms) == 2 else []
    for scheme in dict.fromkeys(ends):
        what, read = f"Rise of perplexity{text} under {scheme}", at("cost", scheme=scheme)
        sentences.append(
            narrative.answer(records, what, read, style.percent, alone=f"{what}: {{}}", errors=True)
        )
    return " ".join(sentences)


def _less(records: Records, costs: dict[str, dict[str, float]], threshold: float) -> str:
    """Who of two loses less, under how many schemes, and by how much where they differ most."""
    first, second = records.arms()
    fewer = sum(one[first] < one[second] for one in costs.values())
    winner, other = (first, second) if 2 * fewer > len(costs) else (second, first)
    wins = sum(one[winner] < one[other] for one in costs.values())
    if not wins:
        return f"{first} and {second} lose alike."
    scheme = max(costs, key=lambda one: abs(costs[one][first] - costs[one][second]))
    points = style.number(100 * abs(costs[scheme][first] - costs[scheme][second]), 2)
    cost = Quantity("", read=at("cost", scheme=scheme), scale=100)
    difference = cost.entries(records, second, first)[0].difference
    words = verdict_in_words(difference, threshold) if difference else ""
    return (
        f"{winner} loses less than {other} under {wins} of {len(costs)} schemes: by {points} "
        f"points under {scheme}{f' ({second} {words})' if words else ''}."
    )


def remarks_on(run: Run) -> list[str]:
    """Notes: measurements that failed and why, items left out, and layers that nothing ran."""
    reasons: dict[str, list[str]] = {}
    unused: set[str] = set()
    for one in run.select("perplexity"):
        unused |= set(one.details.get("unused") or ())
        if one.reason is not None:
            name = one.dimensions.get("scheme", "full precision")
            reasons.setdefault(one.reason, []).append(name)
    found = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    cut = [one.details.get("requests_cut", 0) for one in run.select("accuracy")]
    if any(cut):
        found.append(
            f"longer than the model reads, and asked without the beginning: {max(cut):,} answers "
            "with their prompts"
        )
    left_out = run.header.get("left_out") or {}
    if left_out:
        total = sum(left_out.values()) + int(run.header.get("quantized_parameters", 0))
        share = style.percent(sum(left_out.values()) / total)
        example = next(iter(left_out))
        found.append(
            f"not in linear layers, so in full precision under every scheme: {len(left_out)} "
            f"tensors such as {example}, {share} of the matrices beside embeddings and head"
        )
    if unused:
        found.append(
            f"no text went through {len(unused)} of the quantised layers, such as {min(unused)}"
        )
    return found


def _questions(run: Run) -> str:
    """Questions asked, and the accuracy of guessing."""
    asked, file = run.header.get("questions") or 0, run.header.get("choices")
    chance = run.header.get("chance")
    by_guessing = "" if chance is None else f", chance {style.percent(chance)}"
    return f"{asked:,} questions of {file}{by_guessing}"


def _curves(records: Records, looks: Looks) -> Section | None:
    """A panel a family, in the same scale as its kind's others."""
    found = families(records)
    curves: dict[str, Curves] = {
        family: {(arm, ""): _points(records, arm, bits) for arm in records.arms()}
        for family, bits in found.items()
    }
    blocks: list[Block | None] = []
    for kind in dict.fromkeys(map(kind_of, curves)):
        kin = [family for family in curves if kind_of(family) == kind]
        points = [point for family in kin for one in curves[family].values() for point in one]
        span = [y + side * (spread or 0.0) for _, y, spread in points for side in (-1, 1)]
        blocks.append(Title(text=kind))
        for family in kin:
            missing = [
                arm
                for arm in records.arms()
                if any(
                    records.reason(arm, "perplexity", scheme=one) for one in found[family].values()
                )
            ]
            title = scale_of(family)
            panel = chart(
                title,
                curves[family],
                looks,
                "bits",
                "perplexity",
                across=[FULL, *map(str, found[family])],
                up="auto",
                size=8,
                span=span,
                note=f"Not all measured: {', '.join(missing)}." if missing else "",
                described=f"Perplexity by bits: {title}",
            )
            blocks.append(panel)
    return section("quantization.bits", "", blocks)


def _points(records: Records, arm: str, bits: dict[int, str]) -> list[Point]:
    """(tick, mean perplexity, deviation), full precision first; none where nothing was measured."""
    over = {FULL: summary(records, arm, "perplexity")}
    over |= {f"{n:g}": summary(records, arm, "perplexity", scheme=one) for n, one in bits.items()}
    points = points_of(over)
    return points if any(tick != FULL for tick, *_ in points) else []
