"""Numbers of runs under headings, by their address in the records, and tables of them by arm."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clearhead.errors import NOT_FINITE
from clearhead.records.runs import COMPARISON, Measure, Records, Run
from clearhead.report.pivots import Entry, Found, Heading, Pivot, build, entry
from clearhead.report.statistics import Verdict


@dataclass(frozen=True)
class Quantity(Heading):
    """A number of every run under its heading, shown as value × scale.

    Attributes:
        metric, at: the measure at exactly these dimensions, or one of `DERIVED`; "layer" may be
            "first" or "last".
        by_map: it has a number for each attention map.
        pooled: the mean over all other dimensions is meant.
        judged: whether a difference to the reference is a result.
        one_device: whether runs on other devices than most do not count.
    """

    metric: str = ""
    at: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    write: Callable[[float], str] | None = None
    by_map: bool = False
    pooled: bool = False
    judged: bool = True
    one_device: bool = False

    def measures(self, run: Run, at: Mapping[str, Any]) -> list[Measure]:
        """Measures of a run at `at`, missing values included."""
        if self.pooled:
            return run.select(self.metric, **at)
        one = read(run, self.metric, **at)
        return [] if one is None else [one]

    def found(self, records: Records, arm: str, at: Mapping[str, Any] | None = None) -> Found:
        """The measures of an arm that have a value, by seed; of a pooled number none where one of
        its parts is not finite."""
        at = self.at if at is None else at
        lines = {run.seed: self.measures(run, at) for run in records.of(arm)}
        if self.pooled and any(one.not_finite for ones in lines.values() for one in ones):
            return {}
        valued = {
            seed: [one for one in ones if one.value is not None] for seed, ones in lines.items()
        }
        return {seed: ones for seed, ones in valued.items() if ones}

    def entries(self, records: Records, arm: str, reference: str) -> tuple[Entry, ...]:
        """The cell of an arm; empty where nothing was recorded."""
        if not self.by_map:
            return self._entries(records, arm, reference, [self.at])
        cell: tuple[Entry, ...] = ()
        for name in records.dimension(self.metric, "map", arm):
            # Maps that plain attention lacks are held against its only one.
            ats = [{**self.at, "map": one} for one in (name, "softmax")]
            shown = "" if name == "softmax" else name
            cell += self._entries(records, arm, reference, ats, shown)
        return cell

    def _entries(
        self,
        records: Records,
        arm: str,
        reference: str,
        ats: Sequence[Mapping[str, Any]],
        name: str = "",
    ) -> tuple[Entry, ...]:
        alike = records.on_one_device() if self.one_device else records
        mine, theirs = self.found(alike, arm, ats[0]), Found()
        if not mine:
            known = [one for run in records.of(arm) for one in self.measures(run, ats[0])]
            reasons = [str(one.reason) for one in known if one.reason]
            if any(one.value is not None for one in known):
                reasons = ["trained on another device"]
            text = NOT_FINITE if any(one.not_finite for one in known) else "none"
            shown = [""] * len(known) if self.pooled else reasons
            return tuple(Entry(text, name, note=reason) for reason in shown[:1])
        if self.judged and arm != reference:
            sides = (self.found(alike, reference, at) for at in ats)
            theirs = next(filter(None, sides), Found())
        number = entry(
            mine,
            theirs,
            reference=reference,
            scale=self.scale,
            write=self.write,
            given=records.given or no_seed_varies(records),
        )
        return (replace(number, name=name),)


def _outlier(run: Run) -> float | None:
    top, median = run.value("hidden_top_1"), run.value("hidden_median")
    return None if top is None or not median else top / median


def _outlier_channels(run: Run) -> float | None:
    """Number of outlier channels; None if no hidden states were measured."""
    lines = run.payload("channel")
    measured = lines or run.measure("hidden_top_1") is not None
    return float(lines[0]["of"] if lines else 0) if measured else None


def _sink(run: Run) -> float | None:
    """First-token argmax share: of the difference of maps if there is one, else of softmax."""
    values = (run.value(SHARE, map=name) for name in ("difference", "softmax"))
    return next((one for one in values if one is not None), None)


SHARE = "first_token_argmax_share"
DERIVED: dict[str, Callable[[Run], float | None]] = {
    "parameters": lambda run: run.header.get("parameters"),
    "non_embedding_parameters": lambda run: run.header.get("non_embedding_parameters"),
    "trained perplexity": lambda run: run.value("perplexity", length=run.sequence_length),
    "outlier": _outlier,
    "outlier_channels": _outlier_channels,
    "sink": _sink,
}
"""Numbers of a run that are no single measure: of its header, or made of several measures."""


def read(run: Run, metric: str, **at: Any) -> Measure | None:
    """The measure at exactly these dimensions, or one of `DERIVED`; the "layer" may be "first" or
    "last"."""
    if metric in DERIVED:
        value = DERIVED[metric](run)
        return None if value is None else Measure(metric=metric, value=float(value))
    if at.get("layer") in ("first", "last"):
        layers = [one for one in run.select(metric) if "layer" in one.dimensions]
        end = min if at["layer"] == "first" else max
        return end(layers, key=lambda one: one.dimensions["layer"], default=None)
    return run.measure(metric, **at)


def arm_headings(records: Records) -> list[tuple[Heading, str]]:
    """A heading for each arm, whose note says what holds for all of its numbers: with one seed no
    difference is decided."""
    headings = []
    for place, arm in enumerate(records.arms()):
        runs, n = records.of(arm), len(records.whole(arm))
        seeds = str(Verdict.ONE_SEED) if n == 1 and place else seeds_in_words(n)
        notes = {
            "reference": place == 0 and len(records.arms()) > 1,
            seeds: not (records.given or no_seed_varies(records)),
            f"{len(runs) - n} of {len(runs)} runs diverged": n < len(runs),
            "rate at the edge": records.at_edge(arm),
            "hardly learnt": any(map(_hardly_learnt, runs)),
        }
        note = ", ".join(words for words, holds in notes.items() if holds)
        headings.append((Heading(arm, note=note, arm=arm), arm))
    return headings


def _hardly_learnt(run: Run) -> bool:
    """True of a perplexity above the square root of the vocabulary."""
    perplexity = run.value("perplexity", length=run.sequence_length)
    return perplexity is not None and perplexity**2 > (run.vocabulary or math.inf)


def by_arm(
    records: Records,
    title: str,
    quantities: Iterable[Quantity],
    *,
    corner: str = "model",
    arms_across: bool = False,
) -> Pivot | None:
    """A table of quantities by arm, a row an arm, or a column where `arms_across`."""
    arms, reference = arm_headings(records), next(iter(records.arms()), "")
    named = [(one, one) for one in quantities]

    def fill(one: Quantity, arm: str) -> tuple[Entry, ...]:
        return one.entries(records, arm, reference)

    if arms_across:
        return build(title, named, arms, fill, corner=corner)
    return build(title, arms, named, lambda arm, one: fill(one, arm), corner=corner)


def no_seed_varies(records: Records) -> bool:
    """True of models that are diagnosed or quantised as they are, one run each: whatever trained
    them, a difference is one of these models."""
    return not any(run.study == COMPARISON or len(records.of(run.arm)) > 1 for run in records.runs)


def seeds_in_words(n: int) -> str:
    """1 seed; 3 seeds."""
    return "1 seed" if n == 1 else f"{n} seeds"
