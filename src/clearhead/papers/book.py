"""The book of results as Markdown (book.md): every claim with its published numbers and ours.

A line a claim comes first; then each claim with its comparisons, over all records and in each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from clearhead.papers.claims import Judged, Pooled, judged, threshold_over
from clearhead.papers.contrasts import Claim, Contrast, Judgement, Outcome
from clearhead.papers.requests import NOTHING, arms_of, cost
from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.narrative import enumerate_words
from clearhead.report.statistics import Difference, Verdict

FAMILIES = {
    "diff": "Differential attention, arXiv 2410.05258",
    "coca": "CoCA, arXiv 2309.08646",
    "sas": "Simplified blocks, arXiv 2311.01906",
    "softmax1": "Softmax-1 and OrthoAdam, arXiv 2410.17174",
    "together": "The repairs together (ours)",
    "position": "Positions (ours, after arXiv 2503.02130)",
    "retrofit": "Repair of a trained model (ours)",
}
EDGE = "†"
VERBS = {
    Judgement.HOLDS: ("holds", "hold"),
    Judgement.DOES_NOT_HOLD: ("does not hold", "do not hold"),
}
_SPEED, _BESIDE = "change in tokens a second", "loss, beside other repairs"
# Name, what is changed; words, claim and place there of the comparisons of its price and its gain.
# fmt: off
REPAIRS = (
    ("prefix and rotation, trained", "a token before the text, turned weights",
        ("perplexity of code, against plain training", "retrofit/loss", 0),
        ("perplexity saved at 8 bits, against plain training", "retrofit/controls", 0)),
    ("ALiBi", "positions", ("perplexity at the training length", "position/alibi", 0),
        ("perplexity at 16 × it, neither scaled", "position/alibi", 1)),
    ("CoCA, exact", "scores", ("perplexity at the training length", "coca/exact", 0),
        ("perplexity at 8 × it, both with NTK", "coca/table1", 1)),
    ("SAS-P", "the block", (_SPEED, "sas/table1", 0),
        ("loss, 6 layers", "sas/figure5", 1)),
    ("softmax-1", "the normaliser", ("loss on text", "softmax1/loss", 0),
        ("queries that look most at the first token", "softmax1/share", 0)),
    ("OrthoAdam, shared", "the optimizer", (_BESIDE, "together/loss", 5),
        ("kurtosis of the first token", "softmax1/kurtosis", 2)),
    ("differential V1", "the maps", (_SPEED, "diff/speed", 0),
        ("two of six needles found", "diff/table2", 0)),
    ("differential V2", "the maps", (_SPEED, "diff/speed", 1),
        ("loss", "diff/v2", 0)),
)
# fmt: on


def markdown(sources: Mapping[str, Records]) -> list[str]:
    """The book as lines: repairs, a line a claim, then every comparison by record."""
    rows = judged(sources)
    threshold = threshold_over(ones for _, ones, _ in rows)
    environment = Environment(
        loader=PackageLoader("clearhead.papers", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("book.md").render(
        rows=rows,
        families=FAMILIES,
        worth=[*_worth(rows, threshold)],
        summary=[_summary(one, threshold) for one in rows],
        comparisons=lambda ones: [*_rows(ones, threshold)],
        context=_context,
        counted=_counted,
    )
    return text.splitlines()


def _worth(rows: Sequence[Judged], threshold: float) -> Iterator[Sequence[str]]:
    """The table of repairs, over the records that the claims were judged by."""
    comparisons = {claim.name: ones for claim, ones, _ in rows}
    for name, changes, *places in REPAIRS:
        costs, buys = (comparisons[claim][place] for _, claim, place in places)
        cells = [
            f"{words}: {_difference(one.difference) or _uncounted([one])}"
            for (words, _, _), one in zip(places, (costs, buys), strict=True)
        ]
        records = "; ".join(f"{one.source}: {one.theirs.n} seeds" for one in buys.counted)
        word = worth(costs.judgement(threshold), buys.judgement(threshold))
        yield name, changes, *cells, records or "no record that counts", word


def worth(costs: Judgement, buys: Judgement) -> str:
    """The word for a gain at a price."""
    if buys is Judgement.HOLDS:
        words = {Judgement.HOLDS: "worth it here", Judgement.DOES_NOT_HOLD: "at a price"}
        return words.get(costs, "gains; its price is open")
    words = {Judgement.UNTESTED: "not tested", Judgement.UNDECIDED: "not shown"}
    return words.get(buys, "no")


def _summary(judged: Judged, threshold: float) -> Sequence[str]:
    """The line of a claim, with the comparison of the smallest p-value of those that make the
    verdict what it is."""
    claim, ones, verdict = judged
    telling = _uncounted(ones)
    if measured := [one for one in ones if one.difference is not None]:
        deciding = [one for one in measured if one.judgement(threshold) is verdict] or measured
        one = min(deciding, key=_p_value)
        parts = [f"{one.contrast.words}: {_difference(one.difference)}", *_remarks(one, threshold)]
        parts += [f"{len(one.counted)} records"] * (len(one.counted) > 1)
        telling = ", ".join(parts)
    sure = ", by construction" * claim.by_construction
    return f"`{claim.name}`", claim.says, telling, f"{verdict}{sure}"


def _uncounted(ones: Iterable[Pooled]) -> str:
    """Why no record counts."""
    reasons = dict.fromkeys(one.missing for row in ones for one in row.outcomes)
    return f"not counted: {'; '.join(reasons)}" if reasons else "no record"


def _p_value(one: Pooled) -> float:
    """The p-value of a difference; one that no p-value decides comes last."""
    p = None if one.difference is None else one.difference.p
    return 2.0 if p is None else p


def _rows(ones: Sequence[Pooled], threshold: float) -> Iterator[Sequence[str]]:
    """A line for each comparison over all records, and below it one for each record."""
    for row in ones:
        verdict = ", ".join((str(row.judgement(threshold)), *_remarks(row, threshold)))
        if len(row.outcomes) == 1 and row.counted:
            yield row.contrast.words, *_numbers(row.outcomes[0]), verdict
            continue
        records = f"{len(row.counted)} of {len(row.outcomes)} records"
        records += ", which differ" * row.records_differ
        yield row.contrast.words, records, "", "", _difference(row.difference), verdict
        for one in row.outcomes:
            yield "", *_numbers(one), _note(one, row)


def _numbers(one: Outcome) -> Sequence[str]:
    """The record, both numbers with their spread, marked where a better learning rate may be had,
    and the difference."""
    means = [
        style.with_spread(side.mean, side.deviation or None) + f" {EDGE}" * at_edge
        for side, at_edge in zip((one.ours, one.theirs), one.at_edge, strict=True)
    ]
    return one.source, *means, _difference(one.difference)


def _note(one: Outcome, row: Pooled) -> str:
    """Why a record does not count, or its p-value."""
    if one.missing:
        return f"not counted: {one.missing}"
    if reason := _untestable(one.contrast, one.difference):
        return reason
    if one not in row.counted:
        return "the runs of another record"
    p = one.difference.p
    return "" if p is None else f"p = {style.number(p, 2)}"


def _remarks(row: Pooled, threshold: float) -> Iterator[str]:
    """Remarks beside a verdict: the reason why it is open, its margin."""
    difference, contrast = row.difference, row.contrast
    if difference is not None and row.judgement(threshold) is Judgement.UNDECIDED:
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


def _context(claim: Claim, ones: Sequence[Pooled], verdict: Judgement) -> str:
    """The published numbers, and the command that may decide a claim."""
    parts = [f"Published: {claim.published}"] * bool(claim.published)
    parts += ["Holds by construction"] * claim.by_construction
    if not any(one.outcomes for one in ones):
        parts.append(f"No record yet: `clearhead reproduce {claim.name}`")
    elif verdict in (Judgement.UNDECIDED, Judgement.UNTESTED):
        bill = cost(arms_of(claim.study, "small", claim.arms), "small")
        if bill != NOTHING:
            parts.append(f"At `small`: `clearhead reproduce {claim.name} --scale small`, {bill}")
    return " ".join(f"{part}." for part in parts)


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.interval is None or difference.decidable is None:
        return style.signed(difference.mean)
    low, high = difference.interval
    return f"{style.signed(difference.mean, high - low)} ({style.bounds(low, high)})"


def _counted(rows: Sequence[Judged]) -> str:
    """Numbers of claims by verdict."""
    parts = []
    for verdict in Judgement:
        if n := sum(one is verdict for _, _, one in rows):
            one, several = VERBS.get(verdict, (f"is {verdict}", f"are {verdict}"))
            parts.append(f"{n} {one if n == 1 else several}")
    return f"Of {len(rows)} claims {enumerate_words(parts)}."
