"""Data model of records: runs, and their measures, numbers with dimensions and errors."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from clearhead.errors import NOT_FINITE
from clearhead.named_models import BASELINE
from clearhead.records import intervals

if TYPE_CHECKING:
    import pandas

Line = dict[str, Any]
Key = tuple[str, frozenset[tuple[str, Any]]]

# Dimensions of a measure's line, in the order of tables. One that is absent means "pooled over";
# without a step it was measured at the end, without a scheme in full precision.
DIMENSIONS = (
    *("task", "scaling", "factor", "length", "longest", "depth", "needles", "queries", "pairs"),
    *("data", "file", "judge", "version", "shots", "order", "document", "scheme"),
    *("split", "at", "map", "layer", "head", "tokens", "position", "step"),
)
DRAW = "draw"  # seed of the windows or samples drawn; measures of several draws are pooled
SPLIT = "validation"  # of a measure that names none
_ERRORS = ("interval", "stderr", "items")
INPUT = -1  # the layer number of the stream before the first block
MAPS = ("softmax", "map 1", "map 2", "difference", "shaped")
COMPARISON, DIAGNOSIS, QUANTIZATION = "comparison", "diagnosis", "quantization"
LOST = ("non_finite_tokens", "non_finite_rows")  # counts of what a diagnosis leaves out


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number with its dimensions; `details` are the "reason" for no value, the "interval",
    "stderr", "items" (the parts of the mean), "family" and "bits" of a scheme, and "aside" where
    tables leave it out; `draws` are the measures of which it is the mean, by seed."""

    metric: str
    value: float | None
    dimensions: Line = field(default_factory=dict)
    details: Line = field(default_factory=dict)
    draws: Mapping[int, "Measure"] = field(default_factory=dict)

    @cached_property
    def key(self) -> Key:
        """The identity of the measure within its run."""
        return measure_key(self.metric, self.dimensions)

    @property
    def reason(self) -> str | None:
        """The reason why there is no value, if known."""
        return self.details.get("reason") if self.value is None else None

    @property
    def not_finite(self) -> bool:
        """True of a number that was measured and is NaN or too large."""
        return NOT_FINITE in (self.reason or "")


def measure_key(metric: str, dimensions: Mapping[str, Any]) -> Key:
    """The identity of a measure; dimensions that are None are absent."""
    given = {name: value for name, value in dimensions.items() if value is not None}
    if given.get("split") == SPLIT:
        del given["split"]
    return metric, frozenset(given.items())


def pooled(draws: Mapping[int, Measure]) -> Measure:
    """The mean of several draws of one cell, with an interval over all items, or else the draws."""
    draws = dict(sorted(draws.items()))
    known = [(one, one.value) for one in draws.values() if one.value is not None]
    lost = [one for one in draws.values() if one.not_finite]
    if lost or len(known) < 2:
        return replace([*lost, *(one for one, _ in known), *draws.values()][0], draws=draws)
    measures, values = zip(*known, strict=True)
    details = {name: x for name, x in measures[-1].details.items() if name not in _ERRORS}
    items = [one.details.get("items", ()) for one in measures]
    mean = fmean(values)
    if all(items):
        mean = fmean(values, list(map(len, items)))
        details["items"] = [one for some in items for one in some]
        details["interval"] = intervals.of_metric(measures[0].metric, details["items"], mean)
    else:
        details["interval"] = intervals.of_numbers(values)  # each of many items, not a trial
    return replace(measures[-1], value=mean, details=details, draws=draws)


def added(one: Measure, full: Measure) -> Measure | None:
    """The difference of `one` to `full`, draw by draw, with the interval of their paired items."""
    pairs = {0: (one, full)}
    if one.draws and full.draws:
        pairs = {n: (one.draws[n], full.draws[n]) for n in one.draws if n in full.draws}
    draws = {}
    for draw, (mine, whole) in pairs.items():
        if mine.value is None or whole.value is None:
            continue
        items, others = (side.details.get("items") or () for side in (mine, whole))
        details: Line = {}
        if len(items) == len(others) > 0:
            details["items"] = [a - b for a, b in zip(items, others, strict=True)]
        name, value = f"added_{one.metric}", mine.value - whole.value
        if interval := intervals.of_metric(name, details.get("items", ()), value):
            details["interval"] = interval
        draws[draw] = replace(mine, metric=name, value=value, details=details, draws={})
    return pooled(draws) if draws else None


def costs(known: Mapping[Key, Measure]) -> Iterator[Measure]:
    """The perplexity that a scheme adds, and, as "cost", its share of that in full precision."""
    if (full := known.get(measure_key("perplexity", {}))) is None:
        return
    for one in known.values():
        if one.metric != "perplexity" or "scheme" not in one.dimensions:
            continue
        cost = known.get(measure_key("added_perplexity", one.dimensions)) or added(one, full)
        if cost is None:
            continue
        share, draws, details = None, cost.draws, dict(cost.details)
        if cost.value is not None and full.value:
            share, draws = cost.value / full.value, {}
            for name in ("interval", "items"):
                if details.get(name):
                    details[name] = tuple(part / full.value for part in details[name])
            if details.get("stderr"):
                details["stderr"] /= full.value
        yield from (cost, replace(cost, metric="cost", value=share, details=details, draws=draws))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model, compared as `arm`, with everything recorded under its name."""

    id: str
    arm: str
    preset: str
    label: str
    seed: int
    study: str
    header: Line
    steps: list[Line] = field(default_factory=list)
    measures: dict[Key, Measure] = field(default_factory=dict)
    payloads: dict[str, list[Line]] = field(default_factory=dict)  # other lines, by kind

    @cached_property
    def _by_metric(self) -> dict[str, dict[Key, Measure]]:
        """The measures by metric, with what each scheme costs."""
        by_metric: dict[str, dict[Key, Measure]] = {}
        for one in (*self.measures.values(), *costs(self.measures)):
            by_metric.setdefault(one.metric, {})[one.key] = one
        return by_metric

    def measure(self, metric: str, **dimensions: Any) -> Measure | None:
        """The measure at exactly these dimensions, if it was recorded."""
        return self._by_metric.get(metric, {}).get(measure_key(metric, dimensions))

    def value(self, metric: str, **dimensions: Any) -> float | None:
        """The value at exactly these dimensions, if there is one."""
        measure = self.measure(metric, **dimensions)
        return None if measure is None else measure.value

    def select(self, metric: str, **dimensions: Any) -> list[Measure]:
        """All measures of `metric` at these dimensions, whatever their others are."""
        ones, wanted = self._by_metric.get(metric, {}).values(), dimensions.items()
        return [one for one in ones if all(one.dimensions.get(k) == v for k, v in wanted)]

    def payload(self, kind: str) -> list[Line]:
        """The lines of a kind, of the first draw where there are several."""
        lines = self.payloads.get(kind, [])
        first = next((line[DRAW] for line in lines if DRAW in line), None)
        return [line for line in lines if line.get(DRAW, first) == first]

    @property
    def cells(self) -> list[Line]:
        """Cells of its sweep: task, dimensions, options and provenance."""
        return [cell for cell in self.payloads.get("cell", []) if "made" in cell]

    @property
    def train(self) -> Line:
        """Settings of its training; empty for a model that no run trained."""
        return self.header.get("train") or {}

    @property
    def precision(self) -> str | None:
        """Precision of its training, "bf16" or "fp32"; None if it was not recorded."""
        chosen = self.train.get("precision")
        return None if chosen == "auto" else chosen  # in older records: one or the other

    @property
    def sequence_length(self) -> int | None:
        """Training length in tokens, where the header names it."""
        length = self.train.get("sequence_length")
        return length if isinstance(length, int) else None

    @property
    def diverged(self) -> bool:
        """True if its training did not stay finite, so that it has no final numbers."""
        return bool(self.header.get("diverged"))

    @property
    def at_edge(self) -> bool:
        """True if its learning rate does not lie between two that were tried for it."""
        swept, rate = self.header.get("swept") or (), self.train.get("learning_rate")
        return bool(swept) and rate is not None and not min(swept) < rate < max(swept)

    @property
    def vocabulary(self) -> int | None:
        """The number of its tokens, where the header names it."""
        model, data = (self.header.get(name) or {} for name in ("model", "data"))
        size = model.get("vocab_size") or (data.get("tokenizer") or {}).get("vocabulary")
        return size if isinstance(size, int) else None


@dataclass(frozen=True, kw_only=True)
class Records:
    """Runs, in the order in which they were recorded."""

    runs: tuple[Run, ...]

    @property
    def finite(self) -> bool:
        """True if all numbers measured of models that did not diverge are finite."""
        return not any(
            one.not_finite or (one.value and one.metric in LOST)
            for run in self.runs
            if not run.diverged
            for one in run.measures.values()
        )

    @property
    def given(self) -> bool:
        """True if no model was trained here with a seed: the text read is the only sample."""
        trained = any(run.steps or run.train.get("tokens") for run in self.runs)
        return not trained and len(self.runs) == len({(run.label, run.arm) for run in self.runs})

    def labels(self) -> list[str]:
        """The run just made ("") first, then each committed record."""
        return sorted(dict.fromkeys(run.label for run in self.runs), key=lambda label: label != "")

    def labelled(self, label: str) -> "Records":
        """The runs of one label."""
        return Records(runs=tuple(run for run in self.runs if run.label == label))

    def on_one_device(self) -> "Records":
        """The runs trained on the device and in the precision of most: others' times differ."""

        def place(run: Run) -> tuple[str, str | None] | None:
            device = run.header.get("device") if run.steps else None
            return (device, run.precision) if device else None

        most = Counter(filter(None, map(place, self.runs))).most_common(1)
        kept = (None, *(one for one, _ in most))
        return Records(runs=tuple(run for run in self.runs if place(run) in kept))

    def arms(self) -> list[str]:
        """The arms' names: first the first arm of the baseline, the reference, then the others."""
        names = dict.fromkeys(run.arm for run in self.runs)
        reference = next((run.arm for run in self.runs if run.preset == BASELINE), None)
        return sorted(names, key=lambda name: name != reference)

    def of(self, arm: str) -> list[Run]:
        """The runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def values(self, arm: str, metric: str, **dimensions: Any) -> dict[int, float]:
        """{seed: value} of a measure, without the runs in which it has no value."""
        by_seed = {run.seed: run.value(metric, **dimensions) for run in self.of(arm)}
        return {seed: value for seed, value in by_seed.items() if value is not None}

    def dimension(self, metric: str, name: str, arm: str | None = None, **fixed: Any) -> list[Any]:
        """Every value of dimension `name` in measures of `metric`, sorted."""
        values = {
            one.dimensions[name]
            for run in self.runs
            if arm is None or run.arm == arm
            for one in run.select(metric, **fixed)
            if one.dimensions.get(name) is not None
        }
        return ordered_maps(values) if name == "map" else sorted(values)

    def sequence_length(self) -> int | None:
        """The training length, where all runs share one."""
        lengths = {run.sequence_length for run in self.runs}
        return lengths.pop() if len(lengths) == 1 else None

    def frame(self) -> "pandas.DataFrame":
        """Every recorded number, a row each, with its run, metric and value (NaN where none could
        be measured), and a column for each dimension, in which NaN is "pooled over"."""
        import pandas

        rows = [
            {"label": run.label, "run": run.id, "arm": run.arm, "seed": run.seed}
            | {"metric": one.metric, "value": one.value, **dict(one.key[1])}
            for run in self.runs
            for one in run.measures.values()
        ]
        names = ["label", "run", "arm", "seed", "metric", "value", *DIMENSIONS]
        return pandas.DataFrame(rows, columns=names).astype({"value": float})


def ordered_maps(names: Iterable[str]) -> list[str]:
    """The names of attention maps: the known ones in their usual order, then the others."""
    return sorted(sorted(names), key=lambda name: MAPS.index(name) if name in MAPS else len(MAPS))
