"""The page of a quantisation: what schemes cost, and bits against perplexity."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from clearhead.errors import ClearheadError
from clearhead.records.provenance import source_of
from clearhead.records.runs import Records, Run
from clearhead.report import made, narrative, style
from clearhead.report.charts import Looks, Point, categories, line, new, points_of, scale_axis
from clearhead.report.costs import add_costs, all_noise, four_digits, signed
from clearhead.report.page import Block, Notes, Page, Panel, Panels, Section, Title, section
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
        judge=lambda threshold: _verdict(records),
        warnings=narrative.warnings(records),
    )
    remarks = tuple(f"{run.id}: {remark}." for run in records.runs for remark in remarks_on(run))
    more = ""
    if any(run.measure("accuracy") is not None for run in records.runs):
        more = (
            " Accuracy is the share of multiple-choice questions answered right, by the "
            "log-likelihood of the answers and, where the lm-evaluation-harness does so too, by "
            "that divided by their characters."
        )
    return built.with_sections(
        section(
            "quantization.numbers",
            _extremes(records),
            [results(records), Notes(texts=remarks) if remarks else None],
            more,
        ),
        section(
            "quantization.fewest",
            f"The fewest of the measured bits at which perplexity is within {CLOSE * 100:g} % of "
            "full precision, and is so with every larger number measured.",
            [fewest(records)],
        ),
        _curves(records, built.looks),
        made.section(
            records,
            _facts,
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
    found: dict[str, str | None] = {}
    for run in records.runs:
        for one in run.select("perplexity"):
            if "scheme" in one.dimensions:
                found.setdefault(one.dimensions["scheme"], one.details.get("family"))
    return found


def families(records: Records) -> dict[str, dict[int, str]]:
    """{family: {bits: scheme}}, most bits first, of those that any model has a perplexity in; in
    the order in which the first tried them."""
    found: dict[str, dict[int, str]] = {}
    measured = set()
    for run in records.runs:
        for one in run.select("perplexity"):
            family, bits = one.details.get("family"), one.details.get("bits")
            scheme = one.dimensions.get("scheme")
            if family and bits and scheme:
                found.setdefault(family, {})[bits] = scheme
                measured |= {family} if one.value is not None else set()
    return {
        family: dict(sorted(bits.items(), reverse=True))
        for family, bits in found.items()
        if family in measured
    }


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
            ("perplexity", "perplexity"),
            ("added_perplexity", "added"),
            ("accuracy", "accuracy"),
            ("accuracy_normalised", "by length"),
            ("bytes", "bytes"),
            ("tokens_per_second", "tokens/s"),
        )
    ]

    def fill(scheme: str | None, column: tuple[str, str]) -> tuple[Entry, ...]:
        arm, metric = column
        write = _WRITTEN.get(metric, style.percent)
        quantity = Quantity(
            read=at(metric, scheme=scheme), write=write, judged=metric not in _UNJUDGED
        )
        entries = quantity.entries(records, arm, reference)
        if metric == "added_perplexity" and all_noise(records, arm, str(scheme)):
            return tuple(replace(one, text=f"{one.text}, noise") for one in entries)
        return entries

    return build("cost of schemes", rows, columns, fill, corner="scheme")


def _unquantised(records: Records) -> str:
    """Name of what schemes are compared with. Saved models are compared with bfloat16."""
    saved = any(run.measure("bytes") is not None for run in records.runs)
    return "bfloat16" if saved else "full precision"


_WRITTEN: dict[str, Callable[[float], str]] = {
    "perplexity": four_digits,
    "added_perplexity": signed,
    "bytes": "{:,.0f}".format,
    "tokens_per_second": four_digits,
}
_UNJUDGED = ("perplexity", "bytes", "tokens_per_second")


def fewest_bits(run: Run, bits: dict[int, str]) -> int | None:
    """The fewest bits measured at which, and above which, perplexity is within `CLOSE` of full
    precision; None where there are none."""
    few, full = None, run.value("perplexity")
    for number, scheme in bits.items():
        if run.measure("perplexity", scheme=scheme) is None:
            continue
        value = run.value("perplexity", scheme=scheme)
        if full is None or value is None or value > full * (1 + CLOSE):
            break
        few = number
    return few


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


def _added(records: Records, arm: str) -> dict[str, float]:
    """{scheme: mean perplexity that it adds}."""
    found = {one: summary(records, arm, "added_perplexity", scheme=one) for one in schemes(records)}
    return {scheme: over.mean for scheme, over in found.items() if over is not None}


def _verdict(records: Records) -> list[str]:
    """Costs of the dearest and the cheapest scheme for each model, in two sentences."""
    full = narrative.means(records, "perplexity")
    if not full:
        return ["No perplexity could be measured in full precision."]
    values = narrative.listed(full, four_digits, "for")
    text = narrative.text_in_words(records)
    first = f"In {_unquantised(records)} the perplexity{text} is {values}."
    extremes = _extremes(records)
    return [first, extremes] if extremes else [first]


def _extremes(records: Records) -> str:
    parts = []
    for arm in records.arms():
        costs = _added(records, arm)
        if costs:
            best, worst = narrative.extremes(costs)
            said = {one: _in_words(records, arm, one, costs[one]) for one in (worst, best)}
            text = f"{worst} costs {arm} most ({said[worst]}) and {best} least ({said[best]})"
            parts.append(text if best != worst else f"{best} costs {arm} {said[best]}")
    if len(parts) > narrative.MANY:
        parts = [*parts[: narrative.MANY], "the others as in the table"]
    return f"{'; '.join(parts)}." if parts else ""


def _in_words(records: Records, arm: str, scheme: str, mean: float) -> str:
    """A cost, with the interval of its windows where no seed varies."""
    runs = records.of(arm) if records.given else ()
    costs = (run.measure("added_perplexity", scheme=scheme) for run in runs)
    intervals = (cost.details.get("interval") for cost in costs if cost is not None)
    shown = [signed(mean), *(style.interval(*one) for one in intervals if one)]
    return " ".join(shown) + ", noise" * all_noise(records, arm, scheme)


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
    if run.header.get("questions"):
        found.append(_questions(run))
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
    blocks: list[Block] = []
    for kind in dict.fromkeys(map(kind_of, found)):
        kin = {family: bits for family, bits in found.items() if kind_of(family) == kind}
        points = {
            family: {arm: _points(records, arm, bits) for arm in records.arms()}
            for family, bits in kin.items()
        }
        shown = [
            edge
            for by_arm in points.values()
            for one in by_arm.values()
            for _, y, spread in one
            for edge in (y - (spread or 0), y + (spread or 0))
        ]
        panels = (_panel(records, looks, family, points[family], kin, shown) for family in kin)
        blocks += [Title(text=kind), Panels(panels=tuple(panels))]
    return section(
        "quantization.bits",
        "Fewer bits to the right, full precision at the left; lower is better.",
        blocks,
    )


def _points(records: Records, arm: str, bits: dict[int, str]) -> list[Point]:
    """(tick, mean perplexity, deviation), full precision first; none where nothing was measured."""
    over = {FULL: summary(records, arm, "perplexity")}
    over |= {f"{n:g}": summary(records, arm, "perplexity", scheme=one) for n, one in bits.items()}
    points = points_of(over)
    return points if any(tick != FULL for tick, *_ in points) else []


def _panel(
    records: Records,
    looks: Looks,
    family: str,
    points: dict[str, list[Point]],
    kin: dict[str, dict[int, str]],
    shown: Sequence[float],
) -> Panel:
    figure = new("bits", "perplexity")
    for arm, ones in points.items():
        line(figure, arm, ones, looks[arm])
    categories(figure, [FULL, *map(str, kin[family])])
    low, high = min(shown), max(shown)
    if high >= 4 * low:
        scale_axis(figure, "perplexity", shown)
    else:
        margin = 0.06 * (high - low) or 0.01 * high
        figure.update_yaxes(range=[low - margin, high + margin])
    missing = [
        arm
        for arm in records.arms()
        if any(records.reason(arm, "perplexity", scheme=one) for one in kin[family].values())
    ]
    note = f"Not all measured: {', '.join(missing)}." if missing else ""
    title = scale_of(family)
    return Panel(title=title, figure=figure, note=note, described=f"Perplexity by bits: {title}")


def _facts(run: Run) -> dict[str, list[str]]:
    header = run.header
    versions = made.short(header.get("versions") or {})
    return {
        "command": [str(header.get("command") or "")],
        "model": [f"{header.get('path')}: {header.get('class')}, {header.get('dtype')}"],
        "parameters": [f"{header.get('parameters', 0):,}"],
        "in linear layers": [f"{header.get('quantized_parameters', 0):,}"],
        "text": [f"{header.get('tokens', 0):,} tokens in windows of {header.get('length', 0):,}"],
        "calibration of “fine”": [str(header.get("calibration") or "none")],
        "questions": [_questions(run) if header.get("questions") else "none"],
        "made with": [f"{versions}; {header.get('device')}; {header.get('date')}"],
        "source": [source_of(header)],
    }
