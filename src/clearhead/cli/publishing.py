"""The page of records, and its tables in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.records.runs import Records
from clearhead.report import Page, load, page_of, to_console, write_page
from clearhead.terminal import console, show


def publish(records: Records | Sequence[Path], output: Path, *, title: str = "") -> None:
    """Write the page of the records, and print its tables and verdict."""
    page = page_of(records if isinstance(records, Records) else load(records), title)
    write_page(page, output)
    print_page(page)
    show(f"report: {output}")


def print_page(page: Page) -> None:
    """Print a page's tables and verdict."""
    out = console()
    for part in to_console(page):
        out.print(part)
