"""The book of results as Markdown (book.md): every claim with its published numbers and ours."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from clearhead.papers.claims import Judged, Pooled, judged
from clearhead.papers.contrasts import Contrast, Judgement, Outcome
from clearhead.papers.requests import arms_for, cost
from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.narrative import enumerate_words
from clearhead.report.statistics import Difference, Verdict

EDGE = "†"
# Of each verdict, for one claim and for several.
VERBS = {
    Judgement.HOLDS: ("holds", "hold"),
    Judgement.DOES_NOT_HOLD: ("does not hold", "do not hold"),
    Judgement.UNDECIDED: ("is undecided", "are undecided"),
    Judgement.UNTESTED: ("is untested", "are untested"),
}


def markdown(sources: Mapping[str, Records]) -> list[str]:
    """The book as lines: repairs, a line a claim, then every comparison by record."""
    rows = judged(sources)
    environment = Environment(
        loader=PackageLoader("clearhead.papers", "."), undefined=StrictUndefined
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    text = environment.get_template("book.md").render(
        rows=rows,
        worth=lambda repairs: [*_worth(rows, repairs)],
        summary=[*map(_summary, rows)],
        comparisons=lambda row: [*_rows(row.comparisons)],
        bill=lambda claim: cost(arms_for(claim, "small"), "small"),
        counted=_counted,
    )
    return text.splitlines()


def _worth(rows: Iterable[Judged], repairs: Iterable[Sequence[Any]]) -> Iterator[Sequence[str]]:
    """The table of repairs: a name, its changes, and (words, claim, index) of price and gain."""
    comparisons = {claim.name: ones for claim, ones, _ in rows}
    for name, changes, *places in repairs:
        costs, buys = ones = [comparisons[claim][place] for _, claim, place in places]
        numbers = (_difference(one.difference) or _uncounted([one]) for one in ones)
        cells = [f"{words}: {text}" for (words, *_), text in zip(places, numbers, strict=True)]
        records = "; ".join(f"{one.source}: {one.theirs.n} seeds" for one in buys.counted)
        word = worth(costs.verdict, buys.verdict)
        yield name, changes, *cells, records or "no record that counts", word


def worth(costs: Judgement, buys: Judgement) -> str:
    """The word for a gain at a price."""
    if buys is Judgement.HOLDS:
        words = {Judgement.HOLDS: "worth it here", Judgement.DOES_NOT_HOLD: "at a price"}
        return words.get(costs, "gains; its price is open")
    words = {Judgement.UNTESTED: "not tested", Judgement.UNDECIDED: "not shown"}
    return words.get(buys, "no")


def _summary(row: Judged) -> Sequence[str]:
    """The line of a claim, with the comparison of smallest p-value that has its verdict."""
    claim, ones, verdict = row
    telling = _uncounted(ones)
    if measured := [(one, one.difference) for one in ones if one.difference is not None]:
        deciding = [(one, x) for one, x in measured if one.verdict is verdict] or measured
        one, difference = min(deciding, key=lambda pair: 2.0 if pair[1].p is None else pair[1].p)
        parts = [f"{one.contrast.words}: {_difference(difference)}", *_remarks(one)]
        parts += [f"{len(one.counted)} records"] * (len(one.counted) > 1)
        telling = ", ".join(parts)
    sure = ", by construction" * claim.by_construction
    return f"`{claim.name}`", claim.says, telling, f"{verdict}{sure}"


def _uncounted(ones: Iterable[Pooled]) -> str:
    """Why no record counts."""
    reasons = dict.fromkeys(one.missing for row in ones for one in row.outcomes)
    return f"not counted: {'; '.join(reasons)}" if reasons else "no record"


def _rows(ones: Iterable[Pooled]) -> Iterator[Sequence[str]]:
    """A line for each comparison, and one for each record: its p, or why it does not count."""
    for row in ones:
        words, verdict = row.contrast.words, ", ".join((row.verdict, *_remarks(row)))
        if len(row.outcomes) == 1 and row.counted:
            yield words, *_numbers(row.outcomes[0]), verdict
            continue
        records = f"{len(row.counted)} of {len(row.outcomes)} records"
        records += ", which differ" * row.records_differ
        yield words, records, "", "", _difference(row.difference), verdict
        for one in row.outcomes:
            p = one.difference.p
            note = f"not counted: {one.missing}" if one.missing else ""
            note = note or _untestable(one.contrast, one.difference)
            note = note or "the runs of another record" * (one not in row.counted)
            yield "", *_numbers(one), note or ("" if p is None else f"p = {style.number(p, 2)}")


def _numbers(one: Outcome) -> Sequence[str]:
    """A record's name, its two numbers, marked if their rate is at an edge, and the difference."""
    means = [
        style.with_spread(side.mean, side.deviation or None) + f" {EDGE}" * at_edge
        for side, at_edge in zip((one.ours, one.theirs), one.at_edge, strict=True)
    ]
    return one.source, *means, _difference(one.difference)


def _remarks(row: Pooled) -> Iterator[str]:
    """Remarks beside a verdict: the reason why it is open, its margin."""
    difference, contrast = row.difference, row.contrast
    if difference is not None and row.verdict is Judgement.UNDECIDED:
        open_ = difference.verdict is Verdict.UNDECIDED and difference.decidable is not None
        half = f"±{style.number(difference.decidable or 0.0, 2)}" if open_ else "alone"
        yield _untestable(contrast, difference) or half
    if contrast.margin and not contrast.counted:
        yield f"margin {contrast.margin:g}"
    if row.records_differ:
        yield f"records differ (p = {style.number(row.agreement or 0.0, 2)})"


def _untestable(contrast: Contrast, difference: Difference) -> str:
    """Why a comparison can have no verdict, whatever the threshold."""
    if contrast.counted:
        return ""
    if difference.verdict is Verdict.ONE_SEED:
        return "one seed"
    if difference.alike:
        return "all seeds alike"
    return "" if difference.decidable else "the number compared with may be zero"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.interval is None or difference.decidable is None:
        return style.signed(difference.mean)
    low, high = difference.interval
    return f"{style.signed(difference.mean, high - low)} ({style.bounds(low, high)})"


def _counted(rows: Sequence[Judged]) -> str:
    """Numbers of claims by verdict."""
    counts = Counter(row.verdict for row in rows)
    parts = [f"{n} {words[n > 1]}" for one, words in VERBS.items() if (n := counts[one])]
    return f"Of {len(rows)} claims {enumerate_words(parts)}."
