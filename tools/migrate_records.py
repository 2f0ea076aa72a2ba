"""Rewrite files of records that older clearheads wrote in the present format, in place.

    python tools/migrate_records.py FILE ...

Configurations with "scores" collinear say coca. Three forms are converted: headers of the kinds
`diagnosis` and `quantization` to `run` with a "study"; `scheme`, one result of a quantisation, to
measures; and cells that hold their "result" to measures and a closing line. A result's
numbers that tables leave out become details of its first measure. A file without such lines is left
as it is.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records import jsonl
from clearhead.records.cells import lines_of
from clearhead.records.files import write_text
from clearhead.records.identity import digest_of

Line = dict[str, Any]

STUDIES = ("diagnosis", "quantization")
METRICS = {
    "perplexity": "perplexity",
    "delta": "added_perplexity",
    "accuracy": "accuracy",
    "accuracy_normalised": "accuracy_normalised",
}
COLLINEAR = re.compile(r'("scores": ")collinear')
DECISIVE = ("weights", "data", "splits", "tokens", "dtype")


def is_old(line: Line) -> bool:
    """True of a line of an older form."""
    return line["kind"] in (*STUDIES, "scheme") or (line["kind"] == "cell" and "result" in line)


def migrated(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines in the present format."""
    for line in lines:
        if line["kind"] in STUDIES:
            yield {**line, "kind": "run", "study": line["kind"]}
        elif line["kind"] == "scheme":
            yield from _scheme(line)
        elif is_old(line):
            yield from _cell(line)
        else:
            yield line


def _scheme(line: Line) -> Iterator[Line]:
    """Measures of one scheme; without a scheme, of full precision."""
    kept = {name: line.get(name) for name in ("scheme", "family", "bits", "reason", "unused")}
    details = {name: value for name, value in kept.items() if value not in (None, [])}
    for name, metric in METRICS.items():
        if line.get(name) is not None or name == "perplexity":
            where = {"kind": "measure", "run": line["run"], "metric": metric}
            yield {**where, "value": line.get(name), **details}


def _cell(line: Line) -> Iterator[Line]:
    """Measures of a cell, and the line that closes it."""
    at = {name: value for name, value in line["at"].items() if value is not None}
    where = {"kind": "measure", "run": line["run"], "task": line["task"], **at}
    headlines, key = line["headlines"], _key(line)
    result = {name: value for name, value in line["result"].items() if name != "positions"}
    payloads = lines_of(headlines, **dict.fromkeys(headlines) | result)
    shown = [{**where, **one, "cell": key} for one in payloads if "aside" not in one]
    shown[0] |= {one["metric"]: one["value"] for one in payloads if "aside" in one}
    yield from shown
    rest = {name: line[name] for name in ("task", "at", "options", "made")}
    yield {"kind": "cell", "run": line["run"], "cell": key, "lines": len(shown), **rest}


def _key(line: Line) -> str:
    """The key under which a sweep knows the cell, so that it goes on after the migration."""
    made = line["made"]
    decisive = {name: made.get(name) for name in DECISIVE}
    settings = [line["task"], line["at"], line["options"], decisive]
    return f"{digest_of(settings)[:16]}-{made.get('seed', 0)}"


def main(paths: list[str]) -> int:
    """Migrate files; returns the exit code."""
    if not paths:
        print(__doc__)
        return 2
    for path in map(Path, paths):
        try:
            text = path.read_text("utf-8")
            if (renamed := COLLINEAR.sub(r"\1coca", text)) != text:
                write_text(path, renamed)
            lines = jsonl.read(path)
            if any(map(is_old, lines)):
                write_text(path, "".join(map(jsonl.encode, migrated(lines))))
        except (ClearheadError, OSError, KeyError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
