"""Lines of records to runs and measures, and their writing.

A file holds, a JSON object a line, `run` headers and under each name `measure` lines, besides the
payloads that are no single number: `step` (the training curve), `attention` (one map), `curve` (x
and y), `channel` (an outlier), `note` (what could not be measured), `advice` and `cell` (one of an
evaluation's). Lines of before are converted here: the headers `diagnosis` and `quantization`, and
`scheme`, one result of a quantisation. A cell's results are measures with its dimensions.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.records.runs import (
    COMPARISON,
    DIAGNOSIS,
    DIMENSIONS,
    QUANTIZATION,
    Line,
    Measure,
    Records,
    Run,
)

PAYLOADS = ("cell", "curve", "channel", "note", "advice")
KINDS = ("run", "step", "measure", "attention", *PAYLOADS)
STUDIES = (COMPARISON, DIAGNOSIS, QUANTIZATION)
_OLD = (DIAGNOSIS, QUANTIZATION, "scheme")
_HEADERS = ("run", DIAGNOSIS, QUANTIZATION)
# A folder of `clearhead compare` is named by its arm and seed.
_SEED = re.compile(r"(?P<arm>.+)[-/]seed(?P<seed>\d+)")


def as_line(record: Line) -> str:
    """A record as its line, newline and all; see `jsonl.encode`.

    Raises:
        ClearheadError: the record has no known "kind" or no "run".
    """
    choose("kind of record", str(record.get("kind")), KINDS)
    if not isinstance(record.get("run"), str):
        raise ClearheadError(f'a record needs the name of its "run", found {record.get("run")!r}')
    return jsonl.encode(record)


def append(path: Path, record: Line) -> None:
    """Append the line of a record to `path`; see `jsonl.append`.

    Raises:
        ClearheadError: as `as_line`, or the file cannot be written.
    """
    as_line(record)
    jsonl.append(path, record)


def load(paths: Path | Iterable[Path]) -> Records:
    """Read records from one or more files, of any study and of any version.

    A last line without its end, as an interrupted run leaves it, is skipped. Of two lines about
    the same step, measure or map the later counts, and so of two runs of one arm, seed, label.

    Raises:
        ClearheadError: naming file and line, for anything else that is not a record; two diagnoses
            of one name.
    """
    files = []
    for path in [paths] if isinstance(paths, Path) else paths:
        runs: dict[str, Run] = {}
        jsonl.each([path], partial(_add, runs))
        files.append(runs.values())
    return _records(run for runs in files for run in runs)


def parse(lines: Iterable[Line]) -> Records:
    """Records from lines that are not in a file."""
    runs: dict[str, Run] = {}
    for line in lines:
        _add(runs, line)
    return _records(runs.values())


def _records(found: Iterable[Run]) -> Records:
    runs: dict[tuple[str, str, int], Run] = {}
    sizes: dict[tuple[str, str], str] = {}
    for run in found:
        place = run.label, run.arm, run.seed
        if run.study == DIAGNOSIS and place in runs:
            raise ClearheadError(
                f"a second diagnosis named {run.id!r}: give each a name of its own"
            )
        runs[place] = run
        size = str(run.header.get("size", ""))
        known = sizes.setdefault((run.label, run.arm), size)
        if known != size:
            raise ClearheadError(
                f"{run.arm} is recorded at sizes {known!r} and {size!r} under one label "
                f"({run.label!r}): give the sizes labels of their own"
            )
    return Records(runs=tuple(runs.values()))


def _add(runs: dict[str, Run], line: Line) -> None:
    kind = choose("kind", str(line["kind"]), (*KINDS, *_OLD))
    name = str(line["run"])
    if kind in _HEADERS:
        runs[name] = _run(name, line, runs.get(name))
        return
    if name not in runs:
        raise ValueError(f'no line of kind "run" for {name!r} comes before it')
    run = runs[name]
    for one in _MEASURES.get(kind, lambda _: ())(line):
        run.measures[one.key] = one
    if kind == "step":
        # After a resume the steps since the last checkpoint are recorded again.
        while run.steps and run.steps[-1]["step"] >= line["step"]:
            run.steps.pop()
        run.steps.append(line)
    elif kind == "attention":
        key = (int(line["layer"]), int(line["head"]), str(line["map"]))
        size = len(line["text"])
        if len(line["weights"]) != size or any(len(row) != size for row in line["weights"]):
            raise ValueError(f"the weights are not {size} × {size}, one for each pair of tokens")
        run.attention[key] = line
    elif kind in PAYLOADS:
        if kind == "curve" and len(line["x"]) != len(line["y"]):
            raise ValueError(f"{len(line['x'])} x and {len(line['y'])} y")
        run.payloads.setdefault(kind, []).append(line)
        if kind == "cell" and (points := line["result"].get("positions")):
            curve = {"curve": "cumulative_loss", "task": line["task"], **line["at"]}
            x, y = [one["to"] for one in points], [one["cumulative"] for one in points]
            run.payloads.setdefault("curve", []).append({**curve, "x": x, "y": y})


def _run(name: str, header: Line, old: Run | None) -> Run:
    kind = header["kind"]
    study = choose(
        "study", str(header.get("study", COMPARISON)) if kind == "run" else kind, STUDIES
    )
    arm, seed = name, 0
    if study != COMPARISON and (named := _SEED.fullmatch(name)) is not None:
        arm, seed = named["arm"], int(named["seed"])
    if study == COMPARISON:
        arm, seed = str(header.get("arm", header["preset"])), int(header["seed"])
    elif study == DIAGNOSIS and old is not None:
        raise ValueError(f"a second diagnosis named {name!r}")
    # A resumed run states its header again; what it had measured stays. A model that is quantised
    # again replaces its old results.
    kept = old if study == COMPARISON else None
    return Run(
        id=name,
        arm=arm,
        preset=str(header.get("preset", arm)),
        label=str(header.get("label", "")),
        seed=seed,
        study=study,
        header=header,
        steps=kept.steps if kept else [],
        measures=kept.measures if kept else {},
        attention=kept.attention if kept else {},
        payloads=kept.payloads if kept else {},
    )


def _measures_of_line(line: Line) -> Iterator[Measure]:
    value = _number(line["value"])
    dimensions = {name: line[name] for name in DIMENSIONS if line.get(name) is not None}
    details = {
        name: item
        for name, item in line.items()
        if name not in (*DIMENSIONS, "kind", "run", "metric", "value")
    }
    yield Measure(metric=str(line["metric"]), value=value, dimensions=dimensions, details=details)


def _measures_of_scheme(line: Line) -> Iterator[Measure]:
    """The measures of one scheme of a quantisation; without a scheme, of full precision."""
    scheme = line["scheme"]
    dimensions = {} if scheme is None else {"scheme": str(scheme)}
    details = {name: line.get(name) for name in ("family", "bits", "reason")}
    details["unused"] = tuple(line.get("unused", ()))
    for metric, name in (
        ("perplexity", "perplexity"),
        ("added_perplexity", "delta"),
        ("accuracy", "accuracy"),
        ("accuracy_normalised", "accuracy_normalised"),
    ):
        value = _number(line["perplexity"] if name == "perplexity" else line.get(name))
        if value is not None or name == "perplexity":
            yield Measure(metric=metric, value=value, dimensions=dimensions, details=details)


def _measures_of_cell(line: Line) -> Iterator[Measure]:
    """Headline metrics of a cell, and perplexities of its documents."""
    if not all(isinstance(line[key], dict) for key in ("at", "result", "options", "made")):
        raise ValueError("at, result, options and made of a cell are objects")
    if not isinstance(line["headlines"], list | tuple) or not isinstance(line["task"], str):
        raise ValueError("a cell has a task, and headlines, a list")
    result = line["result"]
    at = {name: value for name, value in line["at"].items() if value is not None}
    dimensions = {"task": line["task"], **at}  # a harness's task goes by its own name
    for headline in map(str, line["headlines"]):
        details: Line = {}
        if headline == "accuracy" and result.get("low") is not None:
            details["interval"] = (result["low"], result["high"])
        if (error := result.get(f"{headline}_stderr")) is not None:
            details["stderr"] = error
        if items := _items(result, headline):
            details["items"] = items
        if result.get("reason"):
            details["reason"] = result["reason"]
        value = _number(result.get(headline))
        yield Measure(metric=headline, value=value, dimensions=dimensions, details=details)
    for one in result.get("documents", ()):
        where = {**dimensions, "document": str(one["document"])}
        value = _number(one.get("perplexity"))
        yield Measure(metric="document_perplexity", value=value, dimensions=where)


_MEASURES: dict[str, Callable[[Line], Iterable[Measure]]] = {
    "measure": _measures_of_line,
    "scheme": _measures_of_scheme,
    "cell": _measures_of_cell,
}


def _items(result: Line, headline: str) -> list[float]:
    """A number for each key or document of a cell, their mean near the headline; none if unknown.

    A document's perplexity is set beside the whole's on the scale of the loss.
    """
    if headline == "perplexity" and result.get(headline) is not None:
        documents = [one["loss"] for one in result.get("documents", ()) if "loss" in one]
        if not documents or None in documents:
            return []
        whole = float(result[headline])
        return [whole * (1 + loss - result["loss"]) for loss in documents]
    return [float(one) for one in result.get(f"{headline}_by_item") or ()]


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measured value")
    return number
