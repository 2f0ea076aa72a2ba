"""Seed summaries and differences of every committed record, frozen as sums over keyed weights, and
the numbers that pages show of some.

A sum weighs each number by a hash of its key, so that no two errors cancel. Where other numbers are
meant, `python tests/report/frozen_numbers.py` writes frozen/numbers.json and page-numbers.json
again.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clearhead.records.loading import load
from clearhead.records.runs import Measure, Records, Run
from clearhead.report import Page, page_of
from clearhead.report.pivots import Pivot, Quantity, difference_of
from clearhead.report.statistics import summarize

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("frozen") / "numbers.json"
FROZEN_PAGES = Path(__file__).with_name("page-numbers.json")
PAGES = json.loads(FROZEN_PAGES.read_text("utf-8"))
OTHERS = ("bench", "gpu", "gpu-check", "learning-rates")  # of other formats
FILES = [path for path in sorted((ROOT / "results").glob("*.jsonl")) if path.stem not in OTHERS]
WORDS = ("family", "bits", "reason", "aside")
TOLERANCE = 1e-9  # of the sum of magnitudes


class Sums:
    """Weighted numbers by name, None where one is missing or not finite."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[float | None]] = defaultdict(list)

    def add(self, name: str, key: tuple[object, ...], *values: float | None) -> None:
        for place, value in enumerate(values):
            told = json.dumps((*key, place), sort_keys=True, default=str)
            weight = 0.5 + int(hashlib.sha256(told.encode()).hexdigest()[:12], 16) / 16**12
            finite = value is not None and math.isfinite(value)
            self.numbers[name].append(weight * value if finite else None)

    def known(self, name: str) -> list[float]:
        return [one for one in self.numbers[name] if one is not None]

    def frozen(self) -> dict[str, list[float]]:
        """[finite numbers, others, weighted sum] by name."""
        known = {name: self.known(name) for name in sorted(self.numbers)}
        return {
            name: [len(ones), len(self.numbers[name]) - len(ones), math.fsum(ones)]
            for name, ones in known.items()
        }


def identity(records: Records) -> str:
    """A hash of all that is no number: what the runs are, and words of measures."""
    told = [
        [run.id, run.arm, run.preset, run.label, run.seed, run.study, len(run.measures)]
        + [len(run.steps), len(run.payload("attention")), run.diverged, run.at_edge, run.precision]
        + [len(run.payload(kind)) for kind in ("curve", "channel", "note", "advice")]
        + [[one.details.get(name) for name in WORDS] for one in run.measures.values()]
        for run in records.runs
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def sums_of(records: Records) -> dict[str, Sums]:
    """By metric; the losses of training under "step"."""
    by_metric: dict[str, Sums] = defaultdict(Sums)
    for run in records.runs:
        for step in run.steps:
            key = run.label, run.id, step["step"]
            by_metric["step"].add("loss", key, step["loss"], step.get("tokens"))
        for one in run.measures.values():
            key = run.label, run.id, one.metric, one.dimensions
            items, error = one.details.get("items") or (), one.details.get("stderr")
            own = *_ends(one.details.get("interval")), error, math.fsum(items) if items else None
            by_metric[one.metric].add("measures", key, one.value, *own)
    for label in records.labels():
        chosen = records.labelled(label)
        reference = chosen.arms()[0]
        for arm in chosen.arms():
            for one in _measures(chosen.of(arm)):
                key = label, arm, one.metric, one.dimensions
                sums = by_metric[one.metric]
                over = summarize([*chosen.values(arm, one.metric, **one.dimensions).values()])
                if over is not None:
                    sums.add("means", key, over.mean, *_ends(over.interval), over.n)
                if arm == reference:
                    continue
                number = Quantity("", metric=one.metric, at=one.dimensions)
                sides = [number.found(chosen, name) for name in (arm, reference)]
                for name, relative in (("differences", False), ("ratios", True)):
                    other = difference_of(*sides, relative=relative, given=chosen.given)
                    if other is not None:
                        sums.add(name, key, other.mean, *_ends(other.interval))
                        sums.add("p", (*key, name), other.p)
    return by_metric


def _ends(interval: Sequence[float] | None) -> Sequence[float | None]:
    return (None, None) if interval is None else interval


def _measures(runs: Iterable[Run]) -> list[Measure]:
    """One for each key."""
    return [*{key: one for run in runs for key, one in run.measures.items()}.values()]


def differing(stem: str, records: Records) -> list[object]:
    """The frozen numbers of a record that are not those of now."""
    frozen = json.loads(FROZEN.read_text())[stem]
    if identity(records) != frozen.pop("runs"):
        return ["runs"]
    sums = sums_of(records)
    now = {metric: one.frozen() for metric, one in sums.items()}
    names, known = (
        {(m, name) for m, ones in side.items() for name in ones} for side in (now, frozen)
    )
    found: list[object] = [*(names ^ known)]
    for metric, name in names & known:
        (finite, missing, total), expected = now[metric][name], frozen[metric][name]
        within = TOLERANCE * math.fsum(map(abs, sums[metric].known(name)))
        if [finite, missing] != expected[:2] or not abs(total - expected[2]) <= within:
            found.append((metric, name))
    return found


def shown(page: Page) -> dict[str, list[str]]:
    """The numbers in each section's tables, sorted: a table may be turned, not its numbers."""
    found: dict[str, list[str]] = defaultdict(list)
    for section in page.sections:
        for table in (one for one in section.blocks if isinstance(one, Pivot)):
            cells = (entry for row in table.cells for cell in row for entry in cell)
            found[section.name] = sorted([*found[section.name], *(one.text for one in cells)])
    return dict(found)


def _freeze() -> None:
    lines, pages = [], []
    for path in FILES:
        records = load(path)
        if path.stem in PAGES:
            line = json.dumps(shown(page_of(records)), ensure_ascii=False)
            pages.append(f"{json.dumps(path.stem)}: {line}")
        numbers: dict[str, Any] = {"runs": identity(records)}
        for metric, sums in sorted(sums_of(records).items()):
            numbers[metric] = {
                name: [finite, missing, float(f"{total:.13g}")]
                for name, (finite, missing, total) in sums.frozen().items()
            }
        line = json.dumps(numbers, separators=(",", ":"))
        lines.append(f"{json.dumps(path.stem)}: {line}")
    for target, ones in ((FROZEN, lines), (FROZEN_PAGES, pages)):
        target.write_text("{\n" + ",\n".join(ones) + "\n}\n", "utf-8")


if __name__ == "__main__":
    _freeze()
