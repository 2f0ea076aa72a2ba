"""The sections of a quantisation: bits against perplexity, and a table of schemes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

from clearhead.errors import ClearheadError
from clearhead.records.runs import Records, Run
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks, chart
from clearhead.report.page import Panel, Section
from clearhead.report.pivots import Pivot, Quantity, by_arm

BITS = "The rise over the perplexity in full precision, by bits; lower is better."
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
COST = Quantity("", metric="cost", write=style.percent)
PERPLEXITY = Quantity("", metric="perplexity", write=partial(style.number, digits=4), judged=False)


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """The sections of one model, or of several side by side; refuses a model without a result in
    full precision, beside which no other says anything."""
    for run in records.runs:
        if run.measure("perplexity") is None:
            raise ClearheadError(f"{run.id} has no result in full precision")
    yield Section("bits", "Bits against perplexity", _charts(records, looks), BITS)
    yield Section("numbers", "What schemes cost", [results(records)], f"{COSTS} {ROUNDED}")


def schemes(records: Records) -> dict[str, tuple[str, int | None]]:
    """{scheme: (family, bits)} of all that any model was measured on, in order."""
    return {
        one.dimensions["scheme"]: (one.details.get("family") or "", one.details.get("bits"))
        for run in records.runs
        for one in run.select("perplexity")
        if "scheme" in one.dimensions
    }


def results(records: Records) -> Pivot | None:
    """The rise under each scheme, and the perplexity: a row a scheme, a column a model."""
    rows = [
        replace(number, title=scheme or "full precision", group=group, at={"scheme": scheme})
        for group, number in (("rise of perplexity", COST), ("perplexity", PERPLEXITY))
        for scheme in (None, *schemes(records))
    ]
    return by_arm(records, "cost in perplexity", rows, arms_across=True)


def verdict(records: Records, threshold: float) -> list[str]:
    """The costs of the dearest and of the cheapest scheme for each model."""
    text = narrative.text_in_words(records)
    known = {}  # of schemes that every model has a cost of, the highest mean
    for scheme in schemes(records):
        costs = [records.values(arm, "cost", scheme=scheme).values() for arm in records.arms()]
        if all(costs):
            known[scheme] = max(map(fmean, costs))
    if not known:
        full = replace(PERPLEXITY, judged=True)
        said = narrative.answer(records, f"Perplexity{text} in full precision", full)
        return [said or "No perplexity could be measured in full precision."]
    sentences = []
    for scheme in dict.fromkeys(pick(known, key=known.__getitem__) for pick in (max, min)):
        cost, rise = (
            replace(COST, at={"scheme": scheme}),
            f"Rise of perplexity{text} under {scheme}",
        )
        sentences.append(
            narrative.answer(records, rise, cost, threshold=threshold, alone=f"{rise}: {{}}")
        )
    return sentences


def remarks_on(run: Run) -> Iterator[str]:
    """Notes: measurements that failed and why, items left out, and layers that nothing ran."""
    reasons: dict[str, list[str]] = {}
    unused: set[str] = set()
    for one in run.select("perplexity"):
        unused |= set(one.details.get("unused") or ())
        if one.reason is not None:
            name = one.dimensions.get("scheme", "full precision")
            reasons.setdefault(one.reason, []).append(name)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    if left_out := run.header.get("left_out") or {}:
        kept = sum(left_out.values())
        share = style.percent(kept / (kept + int(run.header.get("quantized_parameters", 0))))
        yield (
            f"not in linear layers, so in full precision under every scheme: {len(left_out)} "
            f"tensors such as {next(iter(left_out))}, {share} of the matrices beside embeddings "
            "and head"
        )
    if unused:
        yield f"no text went through {len(unused)} of the quantised layers, such as {min(unused)}"


def _charts(records: Records, looks: Looks) -> Iterator[Panel | None]:
    """A chart for the schemes that round the same tensors: colour says which model, dash which
    granularity of scales."""
    kinds: dict[str, dict[str, dict[str, Quantity]]] = {}  # costs by kind, granularity and bits
    ends: dict[str, dict[str, None]] = {}
    for scheme, (family, bits) in schemes(records).items():
        if family and bits:
            kind, _, scale = family.rpartition("-")
            number = replace(COST, at={"scheme": scheme})
            kinds.setdefault(kind or scale, {}).setdefault(scale, {})[f"{bits:g}"] = number
            ends.setdefault(kind or scale, {})[scheme] = None
    for kind, scales in kinds.items():
        across = sorted({bits for by_bits in scales.values() for bits in by_bits}, key=float)
        curves, axes = charts.lines(records, scales), ("bits", "rise of perplexity (%)")
        first, *_, last = (*ends[kind], *ends[kind])
        title = first if first == last else f"{first} to {last}"
        yield chart(title, curves, looks, *axes, across=across[::-1])
