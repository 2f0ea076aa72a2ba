"""The page of records, and its first table in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.records.files import write_text
from clearhead.records.loading import parse, trusted
from clearhead.records.runs import Line
from clearhead.report import Page, load, page_of, render, to_console
from clearhead.terminal import console, say, show


def publish(
    files: Sequence[Path],
    output: Path | None,
    *,
    title: str = "",
    lines: Sequence[Line] | None = None,
) -> int:
    """Write the page of the files' records to `output` if given, print its first table and verdict;
    return as `print_page`. `lines`: the records to show, where the files hold others too."""
    with trusted(*files):
        page = page_of(load(files) if lines is None else parse(lines), title)
    if output is not None:
        write_text(output, render(page))
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
