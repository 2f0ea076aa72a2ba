"""clearhead report: records to a table and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.records.loading import load
from clearhead.report import page_of, to_console, write_page
from clearhead.terminal import console, show


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to read and where to write."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl; or of diagnoses; or of
    what few bits cost."""
    output: Path = Path("report.html")
    """The page."""
    title: str = ""
    """Its title; unless given, the models' names."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="report",
        description="Read records, print the comparison and write one page that opens offline.",
    )
    publish(command.records, command.output, title=command.title)
    return 0


def publish(paths: Sequence[Path], output: Path, *, title: str = "") -> None:
    """Write the page of the records, and print its tables and verdict."""
    page = page_of(load(paths), title)
    write_page(page, output)
    out = console()
    for part in to_console(page):
        out.print(part)
    show(f"report: {output}")
