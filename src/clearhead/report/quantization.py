"""The page of a quantisation: who loses how much, bits against perplexity, a table of schemes."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from clearhead.errors import ClearheadError
from clearhead.records.runs import Records, Run
from clearhead.report import figures, made, narrative, style
from clearhead.report.charts import Curves, Looks, chart
from clearhead.report.costs import add_costs, all_noise, four_digits
from clearhead.report.page import Block, Notes, Page, section
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.quantities import Quantity, arm_headings
from clearhead.report.verdicts import verdict_in_words

ROTATED = "hadamard-"
FULL = "full"  # the tick of full precision
# Family -> (heading of its kind, what shares a scale).
KINDS = {
    "wa": "weights and activations, absmax",
    "w": "weights, zero-point",
    "wa16": "weights, absmax",
    "logits": "attention logits, absmax",
    "mxfp4": "weights, four-bit floats",
    "fp8": "weights and activations, eight-bit floats",
    "kv": "keys and values, zero-point",
    "kv-fp8": "keys and values, eight-bit floats",
}
SCALES = {
    "wa-coarse": "a scale a tensor, both",
    "wa-moderate": "a scale a channel of weights, a tensor of activations",
    "wa-fine": "a scale a channel, both; activations calibrated",
    "wa-token": "a scale a channel of weights, a token of activations",
    "wa-static": "a scale a channel of weights, a tensor of activations, calibrated",
    "fp8-token": "a scale a channel of weights, a token of activations",
    "fp8-static": "a scale a channel of weights, a tensor of activations, calibrated",
    "w-tensor": "a scale a tensor",
    "w-channel": "a scale a channel",
    "w-group": "a scale 128 inputs of a channel",
    "mxfp4": "a power of two 32 inputs of a channel",
    "logits-tensor": "a scale a text and layer",
    "logits-head": "a scale a head",
    "logits-row": "a scale a query",
    "kv-token": "a scale a token and head",
    "kv-channel": "a scale a channel and head of keys, a token and head of values",
    "kv-tensor": "a scale a text and layer",
}
BITS = (
    "Full precision at the left, fewer bits to the right; lower is better. The panels under one "
    "heading share their scale."
)
COSTS = (
    "The rise of perplexity in per cent of that in full precision, with its 95 % interval over the "
    "windows read where records have it; and the perplexity itself. A cost below zero, or with "
    "zero in its interval, is noise."
)
ROUNDED = (
    "Linear layers, attention logits, or keys and values, as named; embeddings, the output matrix, "
    "norms and hidden states in full precision. One text at a time, so that no scale is shared "
    "between texts."
)


def check(records: Records) -> Records:
    """Refuse models without a result in full precision, beside which no other says anything."""
    for run in records.runs:
        if run.measure("perplexity") is None:
            raise ClearheadError(f"{run.id} has no result in full precision")
    return records


def page(records: Records, title: str) -> Page:
    """The page of one model, or of several side by side."""
    for run in check(records).runs:
        add_costs(run)
    remarks = [f"{run.id}: {remark}." for run in records.runs for remark in remarks_on(run)]
    built = Page(
        title=title,
        kicker="clearhead quantize",
        records=records,
        judge=lambda threshold: [_verdict(records, threshold)],
        warnings=remarks,
    )
    return built.with_sections(
        section(
            "bits", "", _charts(records, built.looks), title="Bits against perplexity", caption=BITS
        ),
        section("numbers", "", [results(records)], title="What schemes cost", caption=COSTS),
        made.section(records, ROUNDED),
    )


def kind_of(family: str) -> str:
    """The tensors that a family quantises, in words."""
    if "+" in family:
        return "; ".join(map(kind_of, family.split("+")))
    plain = family.removeprefix(ROTATED)
    first = "kv-fp8" if plain.startswith("kv-fp8") else plain.partition("-")[0]
    kind = KINDS.get(first, plain)
    return kind if plain == family else f"{kind}, rotated (Hadamard)"


def scale_of(family: str) -> str:
    """Granularity of a family's scales, in words."""
    if "+" in family:
        return "; ".join(map(scale_of, family.split("+")))
    family = family.removeprefix(ROTATED).replace("kv-fp8", "kv").replace("wa16", "w")
    kind, _, group = family.partition("w-group")
    if not kind and group:
        return f"a scale {group} inputs of a channel"
    return SCALES.get(family, family)


def schemes(records: Records) -> dict[str, tuple[str, int | None]]:
    """{scheme: (family, bits)} of all that any model was measured on, in order."""
    return {
        one.dimensions["scheme"]: (one.details.get("family") or "", one.details.get("bits"))
        for run in records.runs
        for one in run.select("perplexity")
        if "scheme" in one.dimensions
    }


def results(records: Records) -> Pivot | None:
    """A row a scheme; for each model what the scheme adds, and its perplexity."""
    rows: list[tuple[Heading, str | None]] = [(Heading(title="full precision"), None)]
    for scheme, (family, _) in schemes(records).items():
        group, note = (kind_of(family), scale_of(family)) if family else ("", "")
        rows.append((Heading(title=scheme, group=group, note=note), scheme))
    reference = next(iter(records.arms()), "")

    def fill(scheme: str | None, arm: str) -> tuple[Entry, ...]:
        cost = Quantity("", metric="cost", at={"scheme": scheme}, write=style.percent)
        entries = cost.entries(records, arm, reference)
        if entries and all_noise(records, arm, str(scheme)):
            entries = tuple(replace(one, text=f"{one.text}, noise") for one in entries)
        plain = replace(cost, metric="perplexity", write=four_digits, judged=False)
        found = plain.entries(records, arm, reference)
        return (*entries, *(replace(one, name="perplexity") for one in found))

    return build("cost in perplexity", rows, arm_headings(records), fill, corner="scheme")


def _verdict(records: Records, threshold: float) -> str:
    """Of two models who loses less and by how much; the dearest and the cheapest scheme of all."""
    arms, text = records.arms(), narrative.text_in_words(records)
    costs: dict[str, dict[str, float]] = {}
    for scheme in schemes(records):
        values = {arm: records.values(arm, "cost", scheme=scheme).values() for arm in arms}
        if all(values.values()):
            costs[scheme] = {arm: fmean(ones) for arm, ones in values.items()}
    if not costs:
        what = f"Perplexity{text} in full precision"
        said = narrative.answer(records, what, Quantity("", metric="perplexity", write=four_digits))
        return said or "No perplexity could be measured in full precision."
    ends = [pick(costs, key=lambda one: max(costs[one].values())) for pick in (max, min)]
    sentences = [_less(records, costs, threshold)] if len(arms) == 2 else []
    for scheme in dict.fromkeys(ends):
        what = f"Rise of perplexity{text} under {scheme}"
        cost = Quantity("", metric="cost", at={"scheme": scheme}, write=style.percent)
        alone = f"{what}: {{}}"
        sentences.append(narrative.answer(records, what, cost, alone=alone, errors=True))
    return " ".join(sentences)


def _less(records: Records, costs: dict[str, dict[str, float]], threshold: float) -> str:
    """Who of two loses less where they differ most, and under how many schemes."""
    first, second = records.arms()
    scheme = max(costs, key=lambda one: abs(costs[one][first] - costs[one][second]))
    winner, other = sorted((first, second), key=costs[scheme].__getitem__)
    wins = sum(one[winner] < one[other] for one in costs.values())
    points = 100 * (costs[scheme][other] - costs[scheme][winner])
    if points < 1e-9:
        return f"{first} and {second} lose alike."
    cost = Quantity("", metric="cost", at={"scheme": scheme}, scale=100)
    difference = cost.entries(records, second, first)[0].difference
    words = verdict_in_words(difference, threshold) if difference else ""
    return (
        f"{winner} loses less than {other} under {wins} of {len(costs)} schemes: by "
        f"{style.number(points, 2)} points under {scheme}{f' ({second} {words})' if words else ''}."
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
    remarks = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if left_out := run.header.get("left_out") or {}:
        total = sum(left_out.values()) + int(run.header.get("quantized_parameters", 0))
        share = style.percent(sum(left_out.values()) / total)
        remarks.append(
            f"not in linear layers, so in full precision under every scheme: {len(left_out)} "
            f"tensors such as {next(iter(left_out))}, {share} of the matrices beside embeddings "
            "and head"
        )
    if unused:
        remarks.append(
            f"no text went through {len(unused)} of the quantised layers, such as {min(unused)}"
        )
    return remarks


def _charts(records: Records, looks: Looks) -> Iterator[Block | None]:
    """A panel a family, in the same scale as its kind's others."""
    kinds: dict[str, dict[str, dict[int, str]]] = {}
    for scheme, (family, count) in schemes(records).items():
        if family and count:
            kinds.setdefault(kind_of(family), {}).setdefault(family, {})[count] = scheme
    for kind, families in kinds.items():
        curves = {family: _curves(records, bits) for family, bits in families.items()}
        points = [point for one in curves.values() for line in one.values() for point in line]
        yield Notes(title=kind) if points else None
        for family, bits in families.items():
            missing = [arm for arm in records.arms() if _missing(records, arm, bits)]
            title = scale_of(family)
            yield chart(
                title,
                curves[family],
                looks,
                "bits",
                "perplexity",
                across=[FULL, *map(str, sorted(bits, reverse=True))],
                up="auto",
                size=8,
                span=[y + side * (spread or 0.0) for _, y, spread in points for side in (-1, 1)],
                note=f"Not all measured: {', '.join(missing)}." if missing else "",
                described=f"Perplexity by bits: {title}",
            )


def _missing(records: Records, arm: str, bits: dict[int, str]) -> bool:
    return any(records.reason(arm, "perplexity", scheme=scheme) for scheme in bits.values())


def _curves(records: Records, bits: dict[int, str]) -> Curves:
    """Mean perplexity by bits, full precision first; no line where nothing else was measured."""
    ticks: dict[str | None, str] = {None: FULL}
    ticks |= {bits[one]: f"{one:g}" for one in sorted(bits, reverse=True)}
    rows = figures.numbers(records, "perplexity", "scheme")
    rows = rows.assign(tick=[ticks.get(one.dimensions.get("scheme")) for one in rows["measure"]])
    order = [*ticks.values()].index
    return {
        place: sorted(points, key=lambda point: order(point[0]))
        for place, points in figures.curves(records, rows, "tick").items()
        if any(tick != FULL for tick, *_ in points)
    }
