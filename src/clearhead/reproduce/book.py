"""The book of results: every claim with its published numbers, ours, and the verdict.

A summary comes first, a line a claim; then, folded, each claim with all its comparisons.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.made import section as provenance
from clearhead.report.narrative import enumerate_words
from clearhead.report.page import Block, Fold, Page, Section, Statement, Title
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.statistics import Verdict
from clearhead.report.verdicts import verdict_in_words
from clearhead.reproduce import EXPERIMENTS
from clearhead.reproduce.claims import Claim, counting, judged, threshold_over
from clearhead.reproduce.contrasts import Judgement, Outcome
from clearhead.reproduce.cost import cost

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
CAPTION = (
    "A claim holds where each of its comparisons is decided on its side of zero, or of the margin "
    "that it allows, at a false discovery rate of 5 % over the whole book; it does not hold where "
    "one is decided on the other side. The same numbers count once. Below a claim stands its most "
    "telling comparison: mean ± standard deviation over seeds, against the baseline or the model "
    "named; the difference with its 95 % interval; and, where it is undecided, the smallest effect "
    "that would have shown. Counted numbers have a bound instead. “Alone”: decided by itself, but "
    "not among all. “†”: the lowest or the highest learning rate of those tried, so "
    "that a better one may lie beyond. “Ours”: no paper makes this claim. Published numbers are of "
    "much larger models. Names: see the end of this part."
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
    "prefix, rotation, all turned": "repairs of a trained model (docs/repair-evidence.md).",
    "16 ×": "of the length of texts in training.",
}
COLUMNS = ("comparison", "ours", "compared with", "difference, 95 %", "verdict", "record")
Judged = tuple[Claim, list[Outcome], Judgement]


def page(sources: Mapping[str, Records]) -> Page:
    """All claims as a page."""
    rows = list(judged(sources))
    threshold = threshold_over(outcomes for _, outcomes, _ in rows)
    summary = Section(
        name="summary",
        title="In short",
        answer="",
        caption=CAPTION,
        blocks=tuple(_summary(rows, threshold)),
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
    """The book as lines of Markdown."""
    rows = list(judged(sources))
    threshold = threshold_over(outcomes for _, outcomes, _ in rows)
    yield f"{_counted(rows)}\n\n## In short"
    for block in _summary(rows, threshold):
        match block:
            case Title(text=text):
                yield f"\n**{text}**\n"
            case Statement(name=name, text=text, note=note):
                yield f"- `{name}` {text} *{note}*"
            case Fold(summary=title, lines=lines):
                yield f"\n**{title}**\n"
                yield from (f"- {line}" for line in lines)
    for _, title, chosen in _families(rows):
        yield f"\n## {title}\n\n{_counted(chosen)}"
        for claim, outcomes, verdict in chosen:
            context = f"{claim.says} {_context(claim, outcomes, verdict)}".strip()
            yield f"\n### {claim.name}: {verdict}\n\n{context}"
            if outcomes:
                yield f"\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
            for one in outcomes:
                cells = (
                    *(one.contrast.words, *_means(one), _difference(one)),
                    *(_weighed(one, threshold), one.source),
                )
                yield f"| {' | '.join(cells)} |"


def _families(rows: Sequence[Judged]) -> Iterator[tuple[str, str, list[Judged]]]:
    for family, title in FAMILIES.items():
        if chosen := [one for one in rows if one[0].family == family]:
            yield family, title, chosen


def _summary(rows: Sequence[Judged], threshold: float) -> Iterator[Block]:
    """A line for every claim that has numbers, by verdict; of the others the names."""
    for verdict in Judgement:
        chosen = [one for one in rows if one[2] is verdict]
        if not chosen:
            continue
        title = f"{verdict.capitalize()}: {len(chosen)}"
        if verdict is Judgement.UNTESTED:
            lines = tuple(f"{claim.name}: {claim.says}" for claim, _, _ in chosen)
            yield Fold(summary=f"{title}; the command of each stands below", lines=lines)
            continue
        yield Title(text=title)
        for claim, outcomes, _ in chosen:
            note = _in_one_line(claim, outcomes, verdict, threshold)
            yield Statement(mark=verdict, name=claim.name, text=claim.says, note=note)
    meanings = tuple(f"{name}: {meaning}" for name, meaning in NAMES.items())
    yield Fold(summary="Names and measures", lines=meanings)


def _in_one_line(
    claim: Claim, outcomes: Sequence[Outcome], verdict: Judgement, threshold: float
) -> str:
    """The comparison with the smallest p-value of those that make the verdict what it is."""
    counted = counting(outcomes)
    telling = [one for one in counted if one.judgement(threshold) is verdict]
    one = min(telling or counted, key=_p_value)
    words = one.contrast.words
    ours, theirs = _means(one)
    line = f"{words[:1].upper()}{words[1:]}: {ours} against {theirs}"
    if not one.contrast.counted and (one.difference.interval or one.difference.mean):
        line += f", {_difference(one)}"
    if verdict is Judgement.UNDECIDED:
        line += f"; {_open(one, threshold) if telling else 'other parts have no record'}"
    return f"{line}."


def _open(one: Outcome, threshold: float) -> str:
    """Why a comparison is undecided, or the smallest effect that it would have shown."""
    if reason := _reason(one):
        return reason
    words, seen = "alone", one.difference.decidable
    if one.difference.verdict is Verdict.UNDECIDED and seen is not None:
        words = f"effects from {style.number(seen, 2)} would show"
    return f"{words}, {_margin(one)}" if one.contrast.margin else words


def _p_value(one: Outcome) -> float:
    """The p-value of a difference; what no p-value decides comes last."""
    return 2.0 if one.difference.p is None or not one.applies else one.difference.p


def _shown(judged: Judged, threshold: float) -> Iterator[Block]:
    claim, outcomes, verdict = judged
    note = _context(claim, outcomes, verdict).replace("`", "")
    yield Statement(mark=verdict, name=claim.name, text=claim.says, note=note)
    lines = [(Heading(title=one.contrast.words, note=one.source), one) for one in outcomes]
    columns = [
        (Heading(title=name), name) for name in ("ours", "compared with", "difference", "verdict")
    ]
    table = build(claim.name, lines, columns, partial(_cell, threshold), corner="comparison")
    if isinstance(table, Pivot):
        yield table


def _cell(threshold: float, one: Outcome, column: str) -> tuple[Entry, ...]:
    match column:
        case "ours":
            return (Entry(text=_means(one)[0]),)
        case "compared with":
            return (Entry(text=_means(one)[1]),)
        case "difference":
            difference = one.difference if one.tested else None
            return (Entry(text=_difference(one), difference=difference),)
    note = _reason(one) or (_margin(one) if one.contrast.margin else "")
    return (Entry(text=str(one.judgement(threshold)), note=note),)


def _context(claim: Claim, outcomes: Sequence[Outcome], verdict: Judgement) -> str:
    """The published numbers, what limits the claim, and the command that may decide it."""
    parts = [f"Published: {claim.published}" if claim.published else ""]
    if not outcomes:
        parts.append(f"No record yet: `clearhead reproduce {claim.name}`")
    if verdict is Judgement.UNDECIDED and (bill := _bill_of(claim)):
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


def _weighed(one: Outcome, threshold: float) -> str:
    """The verdict of one comparison, or why it has none."""
    verdict = one.judgement(threshold)
    if verdict is not Judgement.UNDECIDED:
        return str(verdict)
    if reason := _reason(one):
        return f"undecided: {reason}" if one.applies else reason
    words = verdict_in_words(one.difference, threshold)
    if not words.startswith(verdict):
        return f"{verdict}: {words}"
    return f"{words}, {_margin(one)}" if one.contrast.margin else words


def _reason(one: Outcome) -> str:
    """Why a comparison can have no verdict, whatever the threshold."""
    if one.contrast.counted:
        return ""
    if one.missing:
        return f"not counted: {one.missing}"
    if one.difference.verdict is Verdict.ONE_SEED:
        return "one seed"
    if one.difference.alike:
        return "all seeds alike"
    return "" if one.difference.decidable else "the number compared with may be zero"


def _margin(one: Outcome) -> str:
    return f"margin {one.contrast.margin:g}"


def _difference(one: Outcome) -> str:
    if one.difference.interval is None or one.difference.decidable is None:
        return style.signed(one.difference.mean)
    low, high = one.difference.interval
    return f"{style.signed(one.difference.mean, high - low)} ({style.bounds(low, high)})"


def _means(one: Outcome) -> list[str]:
    """Both numbers with their spread, marked where a better learning rate may be had."""
    return [
        style.with_spread(over.mean, over.deviation or None) + f" {EDGE}" * at_edge
        for over, at_edge in zip((one.arm, one.than), one.at_edge, strict=True)
    ]


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
