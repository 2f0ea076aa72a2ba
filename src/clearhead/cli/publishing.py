"""Tables on the terminal and a page, from records of each kind."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.report import compare_all, load, to_console, write_page
from clearhead.report.diagnosis import load_diagnoses
from clearhead.report.diagnosis_page import write_diagnosis
from clearhead.report.diagnosis_table import to_console as diagnosis_to_console
from clearhead.report.evaluations import to_console as grid_to_console
from clearhead.report.quantization import load as load_quantized
from clearhead.report.quantization_page import write_quantization
from clearhead.report.quantization_tables import to_console as quantized_to_console
from clearhead.terminal import console, show


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
