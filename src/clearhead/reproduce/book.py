"""The book of results: every claim with its published numbers, ours, and the verdict.

A line a claim comes first; then each claim with its comparisons, over all records and in each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.made import section as provenance
from clearhead.report.narrative import enumerate_words
from clearhead.report.page import Block, Fold, Page, Section, Statement, Title
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.statistics import LEVEL, Difference, Verdict
from clearhead.reproduce import repairs
from clearhead.reproduce.claims import Claim, Judged, judged, threshold_over
from clearhead.reproduce.contrasts import Contrast, Judgement, Outcome
from clearhead.reproduce.cost import cost
from clearhead.reproduce.experiments import EXPERIMENTS
from clearhead.reproduce.pooling import Pooled

FAMILIES = {
    "diff": "Differential attention, arXiv 2410.05258",
    "coca": "CoCA, arXiv 2309.08646",
    "sas": "Simplified blocks, arXiv 2311.01906",
    "softmax1": "Softmax-1 and OrthoAdam, arXiv 2410.17174",
    "together": "The repairs together (ours)",
    "position": "Positions (ours, after arXiv 2503.02130)",
    "retrofit": "Repair of a trained model (ours)",
}
EDGE, BAR = "†", "\\|"
CAPTION = (
    "A claim holds where each of its comparisons is decided on its side of zero, or of the margin "
    "that it allows, over all comparable records together (Stouffer, by the square root of the "
    "runs), at a false discovery rate of 5 % over the whole book; it does not hold where one is "
    "decided on the other side, and is untested where no record counts. Beside a claim stands its "
    "most telling comparison: the difference with its 95 % interval. “Alone”: decided by itself, "
    "but not among all. “Records differ”: not all have the same difference (p, Cochran's Q). “†”: "
    "the lowest or the highest learning rate of those tried, so that a better one may lie beyond. "
    "Published numbers are of much larger models. Names: see the end of this part."
)
# Names in claims and comparisons that a reader may not know, with what they mean.
NAMES = {
    "baseline, Pre-LN": "a Transformer with a norm before attention and before the MLP.",
    "V1, V2": "differential attention as published, and its authors' later version of it.",
    "V-SkipInit": "blocks without skip connections, as published before SAS (arXiv 2302.10322).",
    "SAS, SAS-P": "simplified blocks: no skip connection around attention, neither values nor a "
    "projection of its own; in SAS-P attention and the MLP stand side by side.",
    "CoCA": "attention whose keys lie in the direction of the queries; exact, or in the form that "
    "its authors trained.",
    "RoPE, NTK": "rotary positions, and a scaling of them for longer texts, by the factor given.",
    "ALiBi, FoX": "a fixed penalty on distance, and a decay that is learned.",
    "softmax-1, null key": "a key of value zero beside all others, so that a head can attend to "
    "nothing; its logit is fixed, or learned.",
    "OrthoAdam": "Adam in a randomly rotated basis of the weights.",
    "kurtosis": "how far single channels of the hidden states stand out: 3 for a bell curve. It is "
    "the mean of that of the first token and that of the others, unless one of them is named, in "
    "windows anywhere in a text.",
    "w8a8-coarse, w4-channel": "weights and activations in 8 bits, one scale for each tensor; "
    "weights in 4 bits, one scale for each channel.",
    "needles, passkeys": "facts hidden in a long text, which the model is to repeat.",
    "prefix, rotation, all turned": "repairs of a trained model (docs/repair.md).",
    "16 ×": "of the length of texts in training.",
}
COLUMNS = ("comparison", "record", "ours", "compared with", "difference, 95 %", "verdict")


def page(sources: Mapping[str, Records]) -> Page:
    """All claims as a page."""
    rows = judged(sources)
    threshold = threshold_over(ones for _, ones, _ in rows)
    meanings = tuple(f"{name}: {meaning}" for name, meaning in NAMES.items())
    blocks: list[Block] = []
    if table := _pivot("Is a repair worth having?", repairs.COLUMNS, _worth(rows, threshold)):
        blocks.append(table)
    for verdict, chosen in _by_verdict(rows):
        blocks.append(Title(text=f"{verdict.capitalize()}: {len(chosen)}"))
        blocks += [_statement(one, telling(one, threshold)) for one in chosen]
    summary = Section(
        name="summary",
        title="In short",
        answer="",
        caption=CAPTION,
        blocks=(*blocks, Fold(summary="Names and measures", lines=meanings)),
    )
    records = Records(
        runs=tuple(
            replace(run, label=", ".join(filter(None, (f"record {name}", run.label))))
            for name, files in sources.items()
            for run in files.runs
        )
    )
    return Page(
        title="The claims of four papers, and what our records say",
        kicker="clearhead · book of results",
        records=records,
        judge=lambda threshold: [_counted(rows)],
        sections=[
            summary,
            *(
                Section(
                    name=family,
                    title=title,
                    answer=_counted(chosen),
                    blocks=tuple(block for one in chosen for block in _shown(one, threshold)),
                    folded=True,
                )
                for family, title, chosen in _families(rows)
            ),
            *([provenance(records)] if records.runs else []),
        ],
    )


def markdown(sources: Mapping[str, Records]) -> Iterator[str]:
    """The book as lines of Markdown: a line a claim, then every comparison by record."""
    rows = judged(sources)
    threshold = threshold_over(ones for _, ones, _ in rows)
    yield "## Is a repair worth having?\n"
    yield from _table(repairs.COLUMNS)
    yield from (_line(cells) for cells in _worth(rows, threshold))
    yield f"\n{_counted(rows)}\n\n## The claims\n"
    yield from _table(("claim", "what it says", "most telling comparison", "verdict"))
    for one in rows:
        sure = ", by construction" * one[0].by_construction
        cells = f"`{one[0].name}`", one[0].says, telling(one, threshold), f"{one[2]}{sure}"
        yield _line(cells)
    yield "\n## Names and measures\n"
    yield from (f"- {name}: {meaning}" for name, meaning in NAMES.items())
    for _, title, chosen in _families(rows):
        yield f"\n## {title}\n\n{_counted(chosen)}"
        for claim, ones, verdict in chosen:
            context = f"{claim.says} {_context(claim, ones, verdict)}".strip()
            yield f"\n### {claim.name}: {verdict}\n\n{context}"
            if any(one.outcomes for one in ones):
                yield ""
                yield from _table(COLUMNS)
                yield from (_line(cells) for cells in _rows(ones, threshold))


def table_of(page: Page) -> Iterator[str]:
    """The table of repairs that a page opens with, as lines of text."""
    tables = (one for one in page.sections[0].blocks if isinstance(one, Pivot))
    for table in tables:
        yield _line([table.corner, *(one.title for one in table.columns)])
        for row, cells in zip(table.rows, table.cells, strict=True):
            yield _line([row.title, *(one.text for cell in cells for one in cell)])


def _worth(rows: Sequence[Judged], threshold: float) -> Iterator[tuple[str, ...]]:
    """The table of repairs."""
    for repair, costs, buys in repairs.comparisons(rows):
        shown = [
            f"{place.words}: {_difference(one.difference) or _uncounted([one])}"
            for place, one in ((repair.costs, costs), (repair.buys, buys))
        ]
        word = repairs.worth(costs.judgement(threshold), buys.judgement(threshold))
        yield (repair.name, repair.changes, *shown, repairs.seen_in(buys), word)


def _pivot(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Pivot | None:
    """A table of texts, the first column its rows' names."""
    return build(
        title,
        [(Heading(title=cells[0]), cells) for cells in rows],
        [(Heading(title=name), place) for place, name in enumerate(columns) if place],
        lambda cells, at: (Entry(text=cells[at]),),
        corner=columns[0],
    )


def _table(columns: Sequence[str]) -> Iterator[str]:
    yield _line(columns)
    yield f"|{' --- |' * len(columns)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _families(rows: Sequence[Judged]) -> Iterator[tuple[str, str, list[Judged]]]:
    for family, title in FAMILIES.items():
        if chosen := [one for one in rows if one[0].family == family]:
            yield family, title, chosen


def _by_verdict(rows: Sequence[Judged]) -> Iterator[tuple[Judgement, list[Judged]]]:
    for verdict in Judgement:
        if chosen := [one for one in rows if one[2] is verdict]:
            yield verdict, chosen


def _statement(judged: Judged, note: str) -> Statement:
    claim, _, verdict = judged
    return Statement(mark=verdict, name=claim.name, text=claim.says, note=note)


def telling(judged: Judged, threshold: float) -> str:
    """The comparison with the smallest p-value of those that make the verdict what it is."""
    _, ones, verdict = judged
    measured = [one for one in ones if one.difference is not None]
    if not measured:
        return _uncounted(ones)
    apt = [one for one in measured if one.judgement(threshold) is verdict] or measured
    one = min(apt, key=_p_value)
    parts = [f"{one.contrast.words}: {_difference(one.difference)}", *_remarks(one, threshold)]
    if len(one.counted) > 1:
        parts.append(f"{len(one.counted)} records")
    return ", ".join(parts)


def _uncounted(ones: Iterable[Pooled]) -> str:
    """Why no record counts."""
    reasons = dict.fromkeys(one.missing for row in ones for one in row.outcomes)
    return f"not counted: {'; '.join(reasons)}" if reasons else "no record"


def _p_value(one: Pooled) -> float:
    """The p-value of a difference; what no p-value decides comes last."""
    p = None if one.difference is None else one.difference.p
    return 2.0 if p is None else p


def _rows(ones: Sequence[Pooled], threshold: float) -> Iterator[tuple[str, ...]]:
    """A line for each comparison over all records, and below it one for each record."""
    for one in ones:
        verdict = ", ".join((str(one.judgement(threshold)), *_remarks(one, threshold)))
        if len(one.outcomes) == 1 and one.counted:
            (only,) = one.outcomes
            numbers = *_means(only), _difference(only.difference)
            yield one.contrast.words, only.source, *numbers, verdict
            continue
        which = f"{len(one.counted)} of {len(one.outcomes)} records"
        which += ", which differ" * _differ(one)
        yield one.contrast.words, which, "", "", _difference(one.difference), verdict
        for each in one.outcomes:
            numbers = *_means(each), _difference(each.difference)
            yield "", each.source, *numbers, _of_one(each, one)


def _of_one(one: Outcome, row: Pooled) -> str:
    """Why a record does not count, or its p-value."""
    if one.missing:
        return f"not counted: {one.missing}"
    if reason := _untestable(one.contrast, one.difference):
        return reason
    if one not in row.counted:
        return "the runs of another record"
    p = one.difference.p
    return "" if p is None else f"p = {style.number(p, 2)}"


def _remarks(one: Pooled, threshold: float) -> Iterator[str]:
    """Remarks beside a verdict: the reason why it is open, its margin."""
    if one.difference is not None and one.judgement(threshold) is Judgement.UNDECIDED:
        reason = _untestable(one.contrast, one.difference)
        if not reason:
            open_ = one.difference.verdict is Verdict.UNDECIDED
            half = one.difference.decidable
            reason = f"±{style.number(half, 2)}" if open_ and half is not None else "alone"
        yield reason
    if one.contrast.margin and not one.contrast.counted:
        yield f"margin {one.contrast.margin:g}"
    if _differ(one):
        yield f"records differ (p = {style.number(one.agreement or 0.0, 2)})"


def _differ(one: Pooled) -> bool:
    return one.agreement is not None and one.agreement <= LEVEL


def _untestable(contrast: Contrast, difference: Difference) -> str:
    """Why a comparison can have no verdict, whatever the threshold."""
    if contrast.counted:
        return ""
    if difference.verdict is Verdict.ONE_SEED:
        return "one seed"
    if difference.alike:
        return "all seeds alike"
    return "" if difference.decidable else "the number compared with may be zero"


def _shown(judged: Judged, threshold: float) -> Iterator[Block]:
    claim, ones, verdict = judged
    yield _statement(judged, _context(claim, ones, verdict).replace("`", ""))
    lines = [
        (Heading(title=cells[0] or "·", note=cells[1]), cells) for cells in _rows(ones, threshold)
    ]
    columns = [(Heading(title=name), place) for place, name in enumerate(COLUMNS) if place > 1]
    table = build(
        claim.name, lines, columns, lambda cells, at: (Entry(text=cells[at]),), corner=COLUMNS[0]
    )
    if isinstance(table, Pivot):
        yield table


def _context(claim: Claim, ones: Sequence[Pooled], verdict: Judgement) -> str:
    """The published numbers, and the command that may decide a claim."""
    parts = [f"Published: {claim.published}" if claim.published else ""]
    parts += ["Holds by construction"] * claim.by_construction
    if not any(one.outcomes for one in ones):
        parts.append(f"No record yet: `clearhead reproduce {claim.name}`")
    elif verdict in (Judgement.UNDECIDED, Judgement.UNTESTED) and (bill := _bill_of(claim)):
        parts.append(f"At `small`: `clearhead reproduce {claim.name} --scale small`, {bill}")
    return " ".join(f"{part}." for part in parts if part)


def _bill_of(claim: Claim) -> str:
    """The cost of the claim's arms at `small`, in words; empty where they train no model."""
    trials = [
        one
        for one in EXPERIMENTS[claim.study].trials("small")
        if any(fnmatchcase(one.name, pattern) for pattern in claim.arms)
    ]
    found = cost(trials)
    return found.in_words("small") if found.runs else ""


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.interval is None or difference.decidable is None:
        return style.signed(difference.mean)
    low, high = difference.interval
    return f"{style.signed(difference.mean, high - low)} ({style.bounds(low, high)})"


def _means(one: Outcome) -> list[str]:
    """Both numbers with their spread, marked where a better learning rate may be had."""
    return [
        style.with_spread(over.mean, over.deviation or None) + f" {EDGE}" * at_edge
        for over, at_edge in zip((one.arm, one.than), one.at_edge, strict=True)
    ]


def _counted(rows: Sequence[Judged]) -> str:
    """Numbers of claims by verdict."""
    parts = [f"{len(chosen)} {_plural(one, len(chosen))}" for one, chosen in _by_verdict(rows)]
    return f"Of {len(rows)} claims {enumerate_words(parts)}."


def _plural(verdict: Judgement, n: int) -> str:
    many = {Judgement.HOLDS: "hold", Judgement.DOES_NOT_HOLD: "do not hold"}
    if verdict in many and n != 1:
        return many[verdict]
    return str(verdict) if verdict in many else f"{'is' if n == 1 else 'are'} {verdict}"
