"""The page of records, and its first table in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.records.files import write_text
from clearhead.records.loading import parse
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
    """Show the page of the files' records, or of `lines` where the files hold others too."""
    return show_page(page_of(load(files) if lines is None else parse(lines), title), output)


def show_page(page: Page, output: Path | None = None) -> int:
    """Write a page to `output` if given, and print its first table and verdict; return the exit
    status, 1 for numbers not finite."""
    if output is not None:
        write_text(output, render(page))
    out = console()
    for part in to_console(page, out.width):
        out.print(part)
    if not page.records.finite:
        say("clearhead: some numbers are not finite")
    if output is not None:
        show(f"page: {output}")
    return int(not page.records.finite)
