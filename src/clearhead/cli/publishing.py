"""The page of records, and its first table in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.records.loading import trusted
from clearhead.records.runs import Records
from clearhead.report import Page, load, page_of, to_console, write_page
from clearhead.terminal import console, say, show


def publish(records: Records | Sequence[Path], output: Path | None, *, title: str = "") -> int:
    """Write the page of the records where a file is given, print its first table and verdict;
    return as `print_page`."""
    if isinstance(records, Records):
        return _published(records, output, title)
    with trusted(*records):
        return _published(load(records), output, title)


def _published(records: Records, output: Path | None, title: str) -> int:
    page = page_of(records, title)
    if output is not None:
        write_page(page, output)
    status = print_page(page)
    if output is not None:
        show(f"page: {output}")
    return status


def print_page(page: Page) -> int:
    """Print a page's first table and verdict; return the exit status, 1 for numbers not finite."""
    out = console()
    for part in to_console(page, out.width):
        out.print(part)
    if not page.records.finite:
        say("clearhead: some numbers are not finite")
    return int(not page.records.finite)
