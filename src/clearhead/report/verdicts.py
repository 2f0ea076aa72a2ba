"""Differences in words, each judged among all comparisons of its page."""

from collections.abc import Hashable, Iterable

from clearhead.report import style
from clearhead.report.statistics import LEVEL, Difference, Verdict, false_discovery_threshold


def family(differences: Iterable[Difference]) -> dict[Hashable, float]:
    """The p-value of each comparison that has one: once, however many tables or claims show it."""
    return {(one.against, one.compared or one): one.p for one in differences if one.p is not None}


def threshold_of(differences: Iterable[Difference]) -> float:
    """The largest p of a difference that holds among all of them (Benjamini-Hochberg)."""
    return false_discovery_threshold(family(differences).values())


def holds(difference: Difference, threshold: float) -> bool:
    """True if a difference is decided, and survives among all comparisons of its page."""
    decided = difference.verdict in (Verdict.LOWER, Verdict.HIGHER)
    return decided and difference.p is not None and difference.p <= threshold


def account(differences: Iterable[Difference]) -> str:
    """Numbers of comparisons made, decided alone, and decided together."""
    found = family(differences).values()
    if not found:
        return ""
    decided = sum(p <= LEVEL for p in found)
    threshold = false_discovery_threshold(found)
    together = sum(p <= threshold for p in found)
    return (
        f"Comparisons on this page: {len(found)}. Decided one by one: {decided}; together as well, "
        f"where chance makes at most {style.percent(LEVEL)} of all verdicts (Benjamini-Hochberg): "
        f"{together}."
    )


def verdict_in_words(difference: Difference, threshold: float) -> str:
    """The verdict; nothing where one seed leaves the whole row undecided.

    `lower by 1.2`; `lower by 1.2, alone` where it does not hold among all comparisons; `undecided
    (±0.7)`, with the smallest effect that could have been decided, which no spread at all does not
    tell; `lower than 0.1` of what is tested against a margin.
    """
    if difference.verdict is Verdict.NO_SPREAD:
        return "undecided (all seeds alike)"
    if difference.decidable is None:
        return ""
    if difference.verdict is Verdict.UNDECIDED:
        return f"{difference.verdict} (±{style.number(difference.decidable, 2)})"
    words = f"{difference.verdict} by {style.number(abs(difference.mean), 2)}"
    if difference.against:
        words = f"{difference.verdict} than {style.number(difference.against, 2)}"
    return words if holds(difference, threshold) else f"{words}, alone"


def interval_in_words(difference: Difference, name: str) -> str:
    """The exact interval and p-value of a difference, as a detail's last words."""
    if difference.interval is None or difference.p is None:
        return ""
    low, high = (style.number(bound, 3) for bound in difference.interval)
    return f"; {name}, 95 % interval: {low} to {high}, p = {style.number(difference.p, 2)}"
