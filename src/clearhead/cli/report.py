"""clearhead report: records to a table and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.records import jsonl
from clearhead.report import compare_all, load, to_console, write_page
from clearhead.report.diagnosis import load_diagnoses
from clearhead.report.diagnosis_page import write_diagnosis
from clearhead.report.diagnosis_table import to_console as diagnosis_to_console
from clearhead.report.evaluations import to_console as grid_to_console
from clearhead.report.quantization import load as load_quantized
from clearhead.report.quantization_page import write_quantization
from clearhead.report.quantization_tables import to_console as quantized_to_console
from clearhead.terminal import console, show


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to read and where to write."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl; or of diagnoses; or of
    what few bits cost."""
    output: Path = Path("report.html")
    """The page."""
    title: str = "clearhead report"
    """Its title."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="report",
        description="Read records, print the comparison and write one page that opens offline.",
    )
    publishers = {"diagnosis": publish_diagnosis, "quantization": publish_quantization}
    kinds = {
        path: publishers.get(str((jsonl.first(path) or {}).get("kind")), publish)
        for path in command.records
    }
    if len(set(kinds.values())) > 1:
        raise ClearheadError(
            f"records of runs, of diagnoses and of quantisations do not share a page: "
            f"give each kind by itself; found {', '.join(map(str, kinds))}"
        )
    kinds[command.records[0]](command.records, command.output, title=command.title)
    return 0


def publish_diagnosis(paths: Sequence[Path], page: Path, *, title: str) -> None:
    """Print the table of the diagnoses side by side, and write their page."""
    models = load_diagnoses(paths)
    write_diagnosis(models, page, title=title)
    console().print(diagnosis_to_console(models))
    show(f"report: {page}")


def publish_quantization(paths: Sequence[Path], page: Path, *, title: str) -> None:
    """Print a table for each model, and write the page of bits against perplexity."""
    models = load_quantized(paths)
    write_quantization(models, page, title=title)
    out = console()
    for model in models:
        out.print(quantized_to_console(model))
    show(f"report: {page}")


def publish(paths: Sequence[Path], page: Path, *, title: str) -> None:
    """Print the tables of each labelled set of records, and write the page of all."""
    from rich.markup import escape

    records = load(paths)
    out = console()
    found = compare_all(records)
    for label in records.labels():
        if (compared := found.arms.get(label)) is not None:
            out.print(to_console(compared, found.threshold))
        if (table := found.equal_loss.get(label)) is not None:
            out.print(f"At equal loss, beside {escape(table.baseline)}:")
            out.print(to_console(table, found.threshold))
        for (of, _), grids in found.evaluations.items():
            for grid in grids if of == label else ():
                out.print(grid_to_console(grid, label, found.threshold))
    if found.account:
        out.print(found.account)
    write_page(records, page, title=title)
    show(f"report: {page}")
