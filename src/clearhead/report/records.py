"""Records: what a run writes, one JSON object a line, and what every table and figure reads.

Kinds of line: `run` (the resolved description), `step` (the training curve), `measure` (one number
with its dimensions), `attention` (one map) and `cell` (one of an evaluation's). A line's `run`
names the run within its own file.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.report.statistics import Summary, summarize

KINDS = ("run", "step", "measure", "attention", "cell")
BASELINE = "transformer"
# A measure is identified by its metric and these; a dimension that is absent means "pooled over",
# and without a step it was measured at the end of training.
DIMENSIONS = ("length", "map", "layer", "head", "tokens", "step")

# Of one attention mechanism, in the order in which a reader should meet them.
MAPS = ("softmax", "map 1", "map 2", "difference", "shaped")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained model: its header line and everything recorded under its name.

    `arm` is what is compared, a preset with its changes, by the name a reader sees; records that
    name none are of a preset as it is.
    """

    id: str
    arm: str
    preset: str
    label: str
    seed: int
    header: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    measures: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    attention: dict[tuple[int, int, str], dict[str, Any]] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, metric: str, **dimensions: Any) -> dict[str, Any] | None:
        """The line of `metric` at exactly these dimensions, if it was recorded."""
        return self.measures.get(_key(metric, dimensions))

    @property
    def trained_somewhere(self) -> bool:
        """Whether the run was trained, and says on which device; some were only evaluated."""
        return bool(self.steps and self.header.get("device"))

    @property
    def sequence_length(self) -> int | None:
        """Training length in tokens, where the header names it."""
        length = (self.header.get("train") or {}).get("sequence_length")
        return length if isinstance(length, int) else None


@dataclass(frozen=True, kw_only=True)
class Records:
    """Runs, in the order in which they were recorded."""

    runs: tuple[Run, ...]

    def labels(self) -> list[str]:
        """The run just made ("") first, then each committed record."""
        found = dict.fromkeys(run.label for run in self.runs)
        return sorted(found, key=lambda label: label != "")

    def labelled(self, label: str) -> "Records":
        return Records(runs=tuple(run for run in self.runs if run.label == label))

    def on_one_device(self) -> "Records":
        """Without the runs that were trained on another device than most were: times and memory do
        not compare between them. A device is known by its kind and its number of threads."""
        trained = Counter(run.header["device"] for run in self.runs if run.trained_somewhere)
        most = [device for device, _ in trained.most_common(1)]
        alike = (
            run for run in self.runs if not run.trained_somewhere or run.header["device"] in most
        )
        return Records(runs=tuple(alike))

    def arms(self) -> list[str]:
        """The reference first: the first arm of the baseline, if it was compared; the others as
        recorded."""
        names = dict.fromkeys(run.arm for run in self.runs)
        reference = next((run.arm for run in self.runs if run.preset == BASELINE), None)
        return sorted(names, key=lambda name: name != reference)

    def of(self, arm: str) -> list[Run]:
        """The runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def values(self, arm: str, metric: str, **dimensions: Any) -> dict[int, float]:
        """{seed: value} of a measure, without the runs that lack it or could not give it."""
        lines = {run.seed: run.measure(metric, **dimensions) for run in self.of(arm)}
        return {
            seed: float(line["value"])
            for seed, line in lines.items()
            if line is not None and line.get("value") is not None
        }

    def summary(self, arm: str, metric: str, **dimensions: Any) -> Summary | None:
        """Mean and spread over seeds; None where no seed has the measure."""
        return summarize(list(self.values(arm, metric, **dimensions).values()))

    def reason(self, arm: str, metric: str, **dimensions: Any) -> str | None:
        """Why a measure has no value, where its line says so."""
        for run in self.of(arm):
            line = run.measure(metric, **dimensions)
            if line is not None and line.get("value") is None and line.get("reason"):
                return str(line["reason"])
        return None

    def dimension(self, metric: str, name: str, arm: str | None = None) -> list[Any]:
        """Every value that dimension `name` takes in the lines of `metric`, sorted."""
        found = {
            line[name]
            for run in self.runs
            if arm is None or run.arm == arm
            for line in run.measures.values()
            if line["metric"] == metric and line.get(name) is not None
        }
        return sorted(found)

    def sequence_length(self) -> int | None:
        """The training length, where all runs share one."""
        lengths = {run.sequence_length for run in self.runs}
        return lengths.pop() if len(lengths) == 1 else None


def as_line(record: dict[str, Any]) -> str:
    """A record as its line, newline and all; see `jsonl.encode`.

    Raises:
        ClearheadError: the record has no known "kind" or no "run".
    """
    choose("kind of record", str(record.get("kind")), KINDS)
    if not isinstance(record.get("run"), str):
        raise ClearheadError(f'a record needs the name of its "run", found {record.get("run")!r}')
    return jsonl.encode(record)


def append(path: Path, record: dict[str, Any]) -> None:
    """Append the line of a record to `path`; see `jsonl.append`.

    Raises:
        ClearheadError: as `as_line`, or the file cannot be written.
    """
    as_line(record)
    jsonl.append(path, record)


def load(paths: Path | Iterable[Path]) -> Records:
    """Read records from one or more files.

    A last line without its end, as an interrupted run leaves it, is skipped. Of two lines about
    the same step, measure or map the later counts, and so of two runs of one arm, seed, label.

    Raises:
        ClearheadError: naming file and line, for anything else that is not a record.
    """
    runs: dict[tuple[str, str, int], Run] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        for run in _load_file(path):
            runs[run.label, run.arm, run.seed] = run
    sizes: dict[tuple[str, str], str] = {}
    for run in runs.values():
        size = str(run.header.get("size", ""))
        known = sizes.setdefault((run.label, run.arm), size)
        if known != size:
            raise ClearheadError(
                f"{run.arm} is recorded at sizes {known!r} and {size!r} under one label "
                f"({run.label!r}): give the sizes labels of their own"
            )
    return Records(runs=tuple(runs.values()))


def ordered_maps(names: Iterable[str]) -> list[str]:
    """The names of attention maps: the known ones in their usual order, then the others."""
    return sorted(names, key=lambda name: MAPS.index(name) if name in MAPS else len(MAPS))


def _load_file(path: Path) -> list[Run]:
    runs: dict[str, Run] = {}
    jsonl.each([path], partial(_add, runs))
    return list(runs.values())


def _add(runs: dict[str, Run], record: dict[str, Any]) -> None:
    kind = choose("kind", str(record["kind"]), KINDS)
    name = str(record["run"])
    if kind == "run":
        old = runs.get(name)
        runs[name] = Run(
            id=name,
            arm=str(record.get("arm", record["preset"])),
            preset=str(record["preset"]),
            label=str(record.get("label", "")),
            seed=int(record["seed"]),
            header=record,
            # A resumed run states its header again; what it had measured stays.
            steps=old.steps if old else [],
            measures=old.measures if old else {},
            attention=old.attention if old else {},
            cells=old.cells if old else [],
        )
        return
    if name not in runs:
        raise ValueError(f'no line of kind "run" for {name!r} comes before it')
    run = runs[name]
    if kind == "step":
        # After a resume the steps since the last checkpoint are recorded again.
        while run.steps and run.steps[-1]["step"] >= record["step"]:
            run.steps.pop()
        run.steps.append(record)
    elif kind == "measure":
        record["value"] = None if record["value"] is None else float(record["value"])
        run.measures[_key(str(record["metric"]), record)] = record
    elif kind == "cell":
        if not all(isinstance(record[key], dict) for key in ("at", "result", "options", "made")):
            raise ValueError("at, result, options and made of a cell are objects")
        if not isinstance(record["headlines"], list) or not isinstance(record["task"], str):
            raise ValueError("a cell has a task, and headlines, a list")
        run.cells.append(record)
    else:
        key = (int(record["layer"]), int(record["head"]), str(record["map"]))
        size = len(record["text"])
        if len(record["weights"]) != size or any(len(row) != size for row in record["weights"]):
            raise ValueError(f"the weights are not {size} × {size}, one for each pair of tokens")
        run.attention[key] = record


def _key(metric: str, dimensions: dict[str, Any]) -> tuple[Any, ...]:
    split = dimensions.get("split", "validation")
    return (metric, split, *(dimensions.get(name) for name in DIMENSIONS))
