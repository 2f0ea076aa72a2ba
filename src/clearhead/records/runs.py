"""Data model of records: runs, and measures with their dimensions."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import NOT_FINITE
from clearhead.named_models import BASELINE

Line = dict[str, Any]
Key = tuple[str, frozenset[tuple[str, Any]]]

# Dimensions of a measure's line, in the order in which a reader should meet them. One that is
# absent means "pooled over"; without a step it was measured at the end, without a scheme in full
# precision. The line's other keys are details, which identify nothing.
DIMENSIONS = (
    *("task", "scaling", "factor", "length", "longest", "depth", "needles", "queries", "pairs"),
    *("data", "file", "judge", "version", "shots", "order", "document", "scheme"),
    *("split", "at", "map", "layer", "head", "tokens", "position", "step"),
)
DRAW = "draw"  # seed of the windows or samples drawn; measures of several draws are pooled
SPLIT = "validation"  # of a measure that names none
INPUT = -1  # the layer number of the stream before the first block
MAPS = ("softmax", "map 1", "map 2", "difference", "shaped")
COMPARISON, DIAGNOSIS, QUANTIZATION = "comparison", "diagnosis", "quantization"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number with its dimensions.

    Attributes:
        value: None where it could not be measured, for the `reason`.
        details: facts about this number: "reason", "interval" (low, high), "stderr", "items" (a
            number for each key, window or document), "family" and "bits" of a scheme, "aside" of a
            number that tables leave out.
        draws: the measures of which it is the mean, by the seed of what was drawn.
    """

    metric: str
    value: float | None
    dimensions: Line = field(default_factory=dict)
    details: Line = field(default_factory=dict)
    draws: dict[int, "Measure"] = field(default_factory=dict)

    @property
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


LOST = ("non_finite_tokens", "non_finite_rows")  # counts of what a diagnosis leaves out


def measure_key(metric: str, dimensions: Line) -> Key:
    """The identity of a measure; dimensions that are None are absent."""
    given = {name: value for name, value in dimensions.items() if value is not None}
    if given.get("split") == SPLIT:
        del given["split"]
    return metric, frozenset(given.items())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model: its header and everything recorded under its name.

    Attributes:
        arm: the displayed name of what is compared: a preset with its changes, or a model.
        study: `COMPARISON` (evaluations included), `DIAGNOSIS` or `QUANTIZATION`.
        payloads: lines other than single numbers, by kind: attention, curve, channel, note, advice,
            cell.
    """

    id: str
    arm: str
    preset: str
    label: str
    seed: int
    study: str
    header: Line
    steps: list[Line] = field(default_factory=list)
    measures: dict[Key, Measure] = field(default_factory=dict)
    payloads: dict[str, list[Line]] = field(default_factory=dict)

    def measure(self, metric: str, **dimensions: Any) -> Measure | None:
        """The measure at exactly these dimensions, if it was recorded."""
        return self.measures.get(measure_key(metric, dimensions))

    def value(self, metric: str, **dimensions: Any) -> float | None:
        """The value at exactly these dimensions, if there is one."""
        measure = self.measure(metric, **dimensions)
        return None if measure is None else measure.value

    def select(self, metric: str, **dimensions: Any) -> list[Measure]:
        """All measures of `metric` at these dimensions, whatever their others are."""
        ones = (one for one in self.measures.values() if one.metric == metric)
        wanted = dimensions.items()
        return [one for one in ones if all(one.dimensions.get(k) == v for k, v in wanted)]

    def payload(self, kind: str, **having: Any) -> list[Line]:
        """The lines of a kind that have these values, of the first draw where there are several."""
        lines = self.payloads.get(kind, [])
        first = next((line[DRAW] for line in lines if DRAW in line), None)
        lines = [line for line in lines if line.get(DRAW, first) == first]
        return [line for line in lines if all(line.get(k) == v for k, v in having.items())]

    @property
    def cells(self) -> list[Line]:
        """Cells of its sweep: task, dimensions, options and how it was made."""
        return [cell for cell in self.payloads.get("cell", []) if "made" in cell]

    @property
    def precision(self) -> str | None:
        """Precision of the training's products, "bf16" or "fp32"; None if it was not recorded."""
        chosen = (self.header.get("train") or {}).get("precision")
        return None if chosen == "auto" else chosen  # of before; it meant one or the other

    @property
    def sequence_length(self) -> int | None:
        """Training length in tokens, where the header names it."""
        length = (self.header.get("train") or {}).get("sequence_length")
        return length if isinstance(length, int) else None

    @property
    def diverged(self) -> bool:
        """True if its training did not stay finite, so that it has no final numbers."""
        return bool(self.header.get("diverged"))

    @property
    def at_edge(self) -> bool:
        """True if its learning rate does not lie between two that were tried for it, diverged ones
        included: a better one may lie beyond."""
        swept = self.header.get("swept") or ()
        rate = (self.header.get("train") or {}).get("learning_rate")
        return bool(swept) and rate is not None and not min(swept) < rate < max(swept)

    @property
    def vocabulary(self) -> int | None:
        """The number of its tokens, where the header names it."""
        model, data = (self.header.get(name) or {} for name in ("model", "data"))
        size = model.get("vocab_size") or (data.get("tokenizer") or {}).get("vocabulary")
        return size if isinstance(size, int) else None

    @property
    def budget(self) -> float | None:
        """Tokens that the run has read; if unknown, tokens planned."""
        read = self.steps[-1].get("tokens") if self.steps else None
        return read or (self.header.get("train") or {}).get("tokens")


@dataclass(frozen=True, kw_only=True)
class Records:
    """Runs, in the order in which they were recorded."""

    runs: tuple[Run, ...]

    @property
    def finite(self) -> bool:
        """True if all numbers measured of models that did not diverge are finite."""
        whole = (run for run in self.runs if not run.diverged)
        return not any(
            one.not_finite or (one.value and one.metric in LOST)
            for run in whole
            for one in run.measures.values()
        )

    @property
    def given(self) -> bool:
        """True if the models were given, none trained here with a seed: the text that was read is
        the only sample."""
        trained = any(run.steps or run.budget for run in self.runs)
        return not trained and len(self.runs) == len({(run.label, run.arm) for run in self.runs})

    def labels(self) -> list[str]:
        """The run just made ("") first, then each committed record."""
        return sorted(dict.fromkeys(run.label for run in self.runs), key=lambda label: label != "")

    def labelled(self, label: str) -> "Records":
        """The runs of one label."""
        return Records(runs=tuple(run for run in self.runs if run.label == label))

    def on_one_device(self) -> "Records":
        """Without the runs that were trained on another device, or in another precision, than most
        were: times and memory do not compare between them. A device is known by its kind and its
        number of threads."""

        places = [
            (run.header["device"], run.precision)
            if run.steps and run.header.get("device")
            else None
            for run in self.runs
        ]
        most = [place for place, _ in Counter(filter(None, places)).most_common(1)]
        alike = zip(self.runs, places, strict=True)
        return Records(runs=tuple(run for run, place in alike if place in (None, *most)))

    def arms(self) -> list[str]:
        """The arms' names: first the reference, which is the first arm of the baseline if it was
        compared; the others as recorded."""
        names = dict.fromkeys(run.arm for run in self.runs)
        reference = next((run.arm for run in self.runs if run.preset == BASELINE), None)
        return sorted(names, key=lambda name: name != reference)

    def of(self, arm: str) -> list[Run]:
        """The runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def whole(self, arm: str) -> list[Run]:
        """The runs of one arm that did not diverge, by seed."""
        return [run for run in self.of(arm) if not run.diverged]

    def at_edge(self, arm: str) -> bool:
        """True if a run of the arm is at the edge of the learning rates tried for it."""
        return any(run.at_edge for run in self.of(arm))

    def values(self, arm: str, metric: str, **dimensions: Any) -> dict[int, float]:
        """{seed: value} of a measure, without the runs in which it has no value."""
        by_seed = {run.seed: run.value(metric, **dimensions) for run in self.of(arm)}
        return {seed: value for seed, value in by_seed.items() if value is not None}

    def dimension(self, metric: str, name: str, arm: str | None = None, **fixed: Any) -> list[Any]:
        """Every value that dimension `name` takes in measures of `metric`, sorted; maps in their
        usual order."""
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


def ordered_maps(names: Iterable[str]) -> list[str]:
    """The names of attention maps: the known ones in their usual order, then the others."""
    return sorted(sorted(names), key=lambda name: MAPS.index(name) if name in MAPS else len(MAPS))
