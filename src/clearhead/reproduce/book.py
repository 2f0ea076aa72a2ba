"""The book of results: every claim with its published numbers, ours, and the verdict."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.made import section as provenance
from clearhead.report.narrative import enumerate_words
from clearhead.report.page import Page, titled
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.statistics import Summary
from clearhead.reproduce.claims import Claim, Judgement, Outcome, judged

FAMILIES = {
    "diff": "Differential attention, arXiv 2410.05258",
    "coca": "CoCA, arXiv 2309.08646",
    "sas": "Simplified blocks, arXiv 2311.01906",
    "softmax1": "Softmax-1 and OrthoAdam, arXiv 2410.17174",
    "together": "The repairs together (ours)",
    "ladder": "Puzzles of several steps (ours, after arXiv 2512.17351)",
    "retrofit": "Repair of a trained model (ours)",
}
CAPTION = (
    "A claim holds where every comparison that it makes is decided on its side, at a false "
    "discovery rate of 5 % over the whole book, or lies within the margin that it allows; "
    "counted numbers have no spread, and are held against their bound. "
    "Undecided rows show the smallest effect that their seeds could have decided. Published "
    "numbers are of much larger models."
)
Judged = tuple[Claim, list[Outcome], Judgement]


def page(sources: Mapping[str, Records]) -> Page:
    """All claims as a page."""
    rows = list(judged(sources))
    sections = [
        titled(family, _counted(chosen), [_table(title, chosen)], title=title, caption=CAPTION)
        for family, title in FAMILIES.items()
        if (chosen := [one for one in rows if one[0].family == family])
    ]
    records = Records(runs=tuple(run for files in sources.values() for run in files.runs))
    made = [provenance(records)] if records.runs else []
    return Page(
        title="The claims of four papers, and what our records say",
        kicker="clearhead · book of results",
        records=records,
        judge=lambda threshold: [_counted(rows)],
        sections=[*filter(None, sections), *made],
    )


def markdown(sources: Mapping[str, Records]) -> Iterator[str]:
    """The book as lines of Markdown, a table a family."""
    rows = list(judged(sources))
    yield _counted(rows)
    for family, title in FAMILIES.items():
        chosen = [one for one in rows if one[0].family == family]
        yield f"\n## {title}\n"
        yield "| claim | published | ours | verdict |\n| --- | --- | --- | --- |"
        for claim, outcomes, verdict in chosen:
            ours = "<br>".join(map(_in_words, outcomes)) or _unmeasured(claim)
            published = claim.published or "–"
            yield f"| `{claim.name}` {claim.says} | {published} | {ours} | {verdict} |"


def _table(title: str, rows: Sequence[Judged]) -> Pivot:
    lines = [
        (Heading(title=name, note=note, group=group), cells)
        for claim, outcomes, verdict in rows
        for group in [f"{claim.name}: {claim.says} {verdict.capitalize()}."]
        for name, note, cells in _lines(claim, outcomes)
    ]
    columns = [(Heading(title=name), name) for name in ("published", "ours", "compared with")]
    table = build(title, lines, columns, lambda row, name: row.get(name, ()), corner="comparison")
    assert table is not None  # every claim has a row
    return table


def _lines(
    claim: Claim, outcomes: Sequence[Outcome]
) -> Iterator[tuple[str, str, dict[str, tuple[Entry, ...]]]]:
    published = (Entry(text=claim.published or "–"),)
    for one in outcomes:
        cells: dict[str, tuple[Entry, ...]] = {
            "published": published,
            "ours": (Entry(text=_mean(one.arm), difference=one.difference),),
            "compared with": (Entry(text=_mean(one.than)),),
        }
        yield one.contrast.words, one.source, cells
    if not outcomes:
        yield "not measured", _unmeasured(claim), {"published": published}


def _unmeasured(claim: Claim) -> str:
    """The reason why there is no number, or the command that measures it."""
    command = f"no record: `clearhead reproduce {claim.name}`" if claim.study else ""
    return ". ".join(filter(None, (command, claim.why)))


def _in_words(one: Outcome) -> str:
    words = f"{one.contrast.words}: {_mean(one.arm)} against {_mean(one.than)}"
    if one.contrast.counted:
        return f"{words}, counted ({one.source})"
    if one.difference.interval is None:
        return f"{words}, one seed"
    if not one.learnt:
        words += f", where both need {style.number(one.contrast.learnt, 3)} within the length"
    elif not one.applies:
        words += f", where the claim needs at least {style.number(one.contrast.needs, 3)}"
    low, high = (style.number(bound, 3) for bound in one.difference.interval)
    return f"{words} ({low} to {high}; {one.source})"


def _mean(over: Summary) -> str:
    return style.with_spread(over.mean, over.deviation)


def _counted(rows: Sequence[Judged]) -> str:
    """Numbers of claims by verdict."""
    counts = Counter(verdict for _, _, verdict in rows)
    parts = [f"{counts[one]} {_plural(one, counts[one])}" for one in Judgement if counts[one]]
    return f"Of {len(rows)} claims {enumerate_words(parts)}."


def _plural(verdict: Judgement, n: int) -> str:
    many = {Judgement.HOLDS: "hold", Judgement.DOES_NOT_HOLD: "do not hold"}
    if verdict in many and n != 1:
        return many[verdict]
    return str(verdict) if verdict in many else f"{'is' if n == 1 else 'are'} {verdict}"
