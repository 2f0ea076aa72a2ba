"""clearhead report: records to a table and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.report import at_equal_loss, comparison, load, to_console, write_page


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to read and where to write."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl."""
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
    publish(command.records, command.output, title=command.title)
    return 0


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
