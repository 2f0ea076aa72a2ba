"""The sections of a quantisation: bits against perplexity, and a table of schemes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

from clearhead.records.runs import Records, Run
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks, chart
from clearhead.report.page import Panel, Section
from clearhead.report.pivots import Cell, Model, Pivot, Quantity, models, pivot

FULL = "full"  # the tick of full precision
BITS = "Full precision at the left, fewer bits to the right; lower is better."
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
PERPLEXITY = Quantity("", metric="perplexity", write=partial(style.number, digits=4))
COST = Quantity("", metric="cost", write=style.percent)  # the share that a scheme adds to it


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """The sections of one model, or of several side by side."""
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
    """A row a scheme; for each model what the scheme adds, and its perplexity."""
    names = (None, *schemes(records))
    rows = [replace(COST, title=one or "full precision", at={"scheme": one}) for one in names]

    def cell(row: Quantity, model: Model) -> Cell:
        entries = row.entries(model)
        # Noise: in every seed sampling of the text explains what the scheme adds.
        costs = (run.measure("added_perplexity", **row.at) for run in model.records.of(model.arm))
        ends = [(one.details.get("interval") or (one.value,))[0] for one in costs if one]
        if all(low is not None and low < 0 for low in ends):
            entries = tuple(replace(one, text=f"{one.text}, noise") for one in entries)
        perplexity = replace(PERPLEXITY, at=row.at, judged=False).entries(model)
        return (*entries, *(replace(one, name="perplexity") for one in perplexity))

    return pivot("cost in perplexity", rows, models(records), cell, "scheme")


def verdict(records: Records, threshold: float) -> Iterator[str]:
    """The costs of the dearest and of the cheapest scheme for each model."""
    text = narrative.text_in_words(records)
    known = {}  # of schemes that every model has a cost of, the highest mean
    for scheme in schemes(records):
        costs = [records.values(arm, "cost", scheme=scheme).values() for arm in records.arms()]
        if all(costs):
            known[scheme] = max(map(fmean, costs))
    if not known:
        full = replace(PERPLEXITY, title=f"Perplexity{text} in full precision")
        unknown = "No perplexity could be measured in full precision."
        yield narrative.answer(records, full) or unknown
    for scheme in dict.fromkeys(pick(known, key=known.__getitem__) for pick in (max, min) if known):
        rise = f"Rise of perplexity{text} under {scheme}"
        cost = replace(COST, title=rise, at={"scheme": scheme})
        yield narrative.answer(records, cost, threshold=threshold, alone=f"{rise}: {{}}")


def remarks_on(run: Run) -> Iterator[str]:
    """Notes: measurements that failed and why, items left out, and layers that nothing ran."""
    measures = run.select("perplexity")
    reasons: dict[str, list[str]] = {one.reason: [] for one in measures if one.reason is not None}
    for one in measures:
        if one.reason is not None:
            reasons[one.reason].append(one.dimensions.get("scheme", "full precision"))
    yield from (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    if left_out := run.header.get("left_out") or {}:
        in_full = sum(left_out.values())
        share = style.percent(in_full / (in_full + int(run.header.get("quantized_parameters", 0))))
        yield (
            f"not in linear layers, so in full precision under every scheme: {len(left_out)} "
            f"tensors such as {next(iter(left_out))}, {share} of the matrices beside embeddings "
            "and head"
        )
    if unused := {layer for one in measures for layer in one.details.get("unused") or ()}:
        yield f"no text went through {len(unused)} of the quantised layers, such as {min(unused)}"


def _charts(records: Records, looks: Looks) -> Iterator[Panel | None]:
    """A chart for schemes that round the same tensors, by model and granularity of scales."""
    full = replace(PERPLEXITY, at={"scheme": None})
    kinds: dict[str, dict[str, dict[str, Quantity]]] = {}  # by kind, granularity and bits
    ends: dict[str, list[str]] = {}
    descending = sorted(schemes(records).items(), key=lambda one: -(one[1][1] or 0))
    for scheme, (family, bits) in descending:
        if family and bits:
            kind, _, scale = family.rpartition("-")
            by_bits = kinds.setdefault(kind or scale, {}).setdefault(scale, {FULL: full})
            by_bits[f"{bits:g}"] = replace(full, at={"scheme": scheme})
            ends.setdefault(kind or scale, []).append(scheme)
    for kind, scales in kinds.items():
        lines = charts.lines(records, scales).groupby(["arm", "variant"], sort=False)
        curves = lines.filter(lambda points: {*points["x"]} != {FULL})
        across = [FULL, *sorted({*curves["x"]} - {FULL}, key=float, reverse=True)]
        title = " to ".join(dict.fromkeys((ends[kind][0], ends[kind][-1])))
        yield chart(title, curves, looks, "bits", "perplexity", across=across, up="auto")
