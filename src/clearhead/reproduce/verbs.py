"""Verbs of claims: an arm's number is lower, higher, no worse, or a share of another arm's."""

from dataclasses import replace
from typing import Any

from clearhead.reproduce.contrasts import Contrast, Gate
from clearhead.reproduce.readings import Patterns, Reading


def number(metric: str, *, times: float | None = None, label: str = "*", **at: Any) -> Reading:
    """A number by its metric and dimensions, of no arm yet; see `Reading`."""
    return Reading(metric=metric, times=times, label=label, at=at)


LOSS = number("loss", times=1)


def lower(
    words: str, what: Reading, arm: Patterns | Reading, than: Patterns | Reading, *gates: Gate
) -> Contrast:
    """The number of `arm` is lower than that of `than`."""
    return _contrast("lower", words, what, arm, than, gates=gates)


def higher(
    words: str, what: Reading, arm: Patterns | Reading, than: Patterns | Reading, *gates: Gate
) -> Contrast:
    """The number of `arm` is higher than that of `than`."""
    return _contrast("higher", words, what, arm, than, gates=gates)


def no_worse(
    words: str,
    what: Reading,
    arm: Patterns | Reading,
    than: Patterns | Reading,
    *gates: Gate,
    by: float = 0.0,
    better: str = "lower",
) -> Contrast:
    """The number of `arm` is worse than that of `than` by no more than the margin `by`."""
    claimed = {"lower": "not higher", "higher": "not lower"}[better]
    return _contrast(claimed, words, what, arm, than, gates=gates, margin=by)


def ratio(
    words: str,
    what: Reading,
    arm: Patterns | Reading,
    than: Patterns | Reading,
    *,
    below: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
    counted: bool = False,
) -> Contrast:
    """The number of `arm` as a share of that of `than`: below 1, above 1 where no bound is given,
    or within a bound."""
    claimed, margin = ("higher" if below is None else "lower"), 0.0
    if at_most is not None:
        claimed, margin = "not higher", at_most - 1
    if at_least is not None:
        claimed, margin = "not lower", 1 - at_least
    return _contrast(claimed, words, what, arm, than, margin=margin, relative=True, counted=counted)


def blocked(contrast: Contrast) -> Contrast:
    """The contrast of a factorial's arms, compared within each seed."""
    return replace(contrast, blocked=True)


def reaches(what: Reading, arm: Patterns, least: float, name: str = "") -> Gate:
    """The gate of an arm whose number must be at least so much."""
    return Gate(reading=what.of(arm), least=least, why=f"{name or arm} is below {least:g}")


def _contrast(
    claimed: str,
    words: str,
    what: Reading,
    arm: Patterns | Reading,
    than: Patterns | Reading,
    **others: Any,
) -> Contrast:
    ours, theirs = (one if isinstance(one, Reading) else what.of(one) for one in (arm, than))
    return Contrast(words=words, claimed=claimed, ours=ours, theirs=theirs, **others)
