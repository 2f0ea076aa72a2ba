"""clearhead report: records to a table and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.report import at_equal_loss, comparison, load, to_console, write_page
from clearhead.report.diagnosis import is_diagnosis, load_diagnoses
from clearhead.report.diagnosis_page import write_diagnosis
from clearhead.report.diagnosis_table import to_console as diagnosis_to_console


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to read and where to write."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl; or of diagnoses."""
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
    diagnoses = [path for path in command.records if is_diagnosis(path)]
    if not diagnoses:
        publish(command.records, command.output, title=command.title)
    elif len(diagnoses) == len(command.records):
        publish_diagnosis(diagnoses, command.output, title=command.title)
    else:
        raise ClearheadError(
            f"{diagnoses[0]} is a diagnosis, and other files are not: give each kind by itself"
        )
    return 0


def publish_diagnosis(paths: Sequence[Path], page: Path, *, title: str) -> None:
    """Print the table of the diagnoses side by side, and write their page."""
    from rich.console import Console

    models = load_diagnoses(paths)
    write_diagnosis(models, page, title=title)
    console = Console()
    console.print(diagnosis_to_console(models))
    console.print(f"report: {page}")


def publish(paths: Sequence[Path], page: Path, *, title: str) -> None:
    """Print the table of each labelled set of records, and write the page of all."""
    from rich.console import Console
    from rich.markup import escape

    records = load(paths)
    console = Console()
    for label in records.labels():
        labelled = records.labelled(label)
        console.print(to_console(comparison(labelled)))
        if (table := at_equal_loss(labelled)) is not None:
            console.print(f"At equal loss, beside {escape(table.baseline)}:")
            console.print(to_console(table))
    write_page(records, page, title=title)
    console.print(f"report: {page}")
