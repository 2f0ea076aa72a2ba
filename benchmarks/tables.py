"""The tables of docs/performance.md: `python -m benchmarks.tables`.

From results/gpu.jsonl, and the dispatch table of attention.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import dispatch_table

RECORDS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
# Titles that end in a length or a cache, whose records are columns of one table.
COLUMNS = re.compile(
    r"(?P<table>attention, D \d+|attention|decoding, \d+)(?:, T | × )(?P<column>\d+)"
)
# Kernels that are gone; a bench whose figures `make gpu-figures` took over.
GONE = ("differential-fused", "differential-single-pass")
SUPERSEDED = "training-step"


def markdown(path: Path = RECORDS) -> str:
    """Ratios by device: the newest record of each title and pair of sides."""
    newest: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        if not record["ours"].endswith(GONE) and record["name"] != SUPERSEDED:
            device = re.split("[ ,]", record["device"].removeprefix("NVIDIA "))[0]
            newest[device, record["name"], record["ours"], record["peer"]] = record
    tables: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    plain: list[str] = []
    for (device, name, ours, peer), record in newest.items():
        if match := COLUMNS.match(name):
            table = tables.setdefault((device, match["table"], peer), {})
            table.setdefault(ours, {})[int(match["column"])] = record["ratio"]
        else:
            plain.append(f"| {name} | {ours} | {peer} | {record['ratio']:.3f} | {device} |")
    lines = []
    for (device, title, peer), rows in tables.items():
        title = title.replace("decoding, ", "decoding, batch ")
        lines += _pivot(f"{title}, time / {peer}'s ({device})", rows)
    lines += ["| figure | of | peer | ratio | device |", "| --- | --- | --- | --- | --- |", *plain]
    return "\n".join(lines)


def _pivot(title: str, rows: Mapping[str, Mapping[int, float]]) -> list[str]:
    columns = sorted({column for row in rows.values() for column in row})
    lines = [f"| {title} | " + " | ".join(f"{column:,}" for column in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for name, row in rows.items():
        cells = (f"{row[column]:.2f}" if column in row else "" for column in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    print(markdown(), dispatch_table.markdown(), sep="\n\n")
