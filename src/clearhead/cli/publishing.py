"""The page of records, and its tables in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.report import load, page_of, to_console, write_page
from clearhead.terminal import console, show


def publish(paths: Sequence[Path], output: Path, *, title: str = "") -> None:
    """Write the page of the records, and print its tables and verdict."""
    page = page_of(load(paths), title)
    write_page(page, output)
    out = console()
    for part in to_console(page):
        out.print(part)
    show(f"report: {output}")
