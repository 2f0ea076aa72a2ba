"""A page for the terminal: its first table and the verdict."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clearhead.report.page import Page
from clearhead.report.pivots import Entry, Heading, Pivot
from clearhead.report.verdicts import verdict_in_words

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 12  # characters that a column is reckoned to take


def to_console(page: Page, width: int = 100) -> Iterator[Any]:
    """The page's first table in sight, then the verdict, the next command and the warnings.

    Args:
        width: of the terminal, in characters.
    """
    from rich.text import Text

    for section in page.sections:
        found = [block for block in section.blocks if isinstance(block, Pivot)]
        if found and not section.folded:
            yield from tables(max(found, key=lambda one: len(one.rows)), page.threshold, width)
            break
    yield Text("\n".join(["", *page.verdict]))
    yield from (Text(f"next: {command}") for command in page.next)
    yield from (Text(f"warning: {text}", style="yellow") for text in page.warnings)


def tables(pivot: Pivot, threshold: float, width: int = 100) -> "Iterator[Table | str]":
    """A table with as many columns as fit, and the number of those that do not.

    Args:
        threshold: the largest p of a difference that holds among all that are shown.
    """
    from rich.markup import escape
    from rich.table import Table

    shown = max(1, width // WIDTH - 2)
    table = Table(title=escape(pivot.title), title_justify="left", title_style="bold")
    table.add_column(escape(pivot.corner), overflow="fold")
    for column in pivot.columns[:shown]:
        names = (column.group, column.title, f"({column.note})" if column.note else "")
        name = "\n".join(filter(None, names))
        table.add_column(escape(name), justify="right", overflow="fold")
    heading = ""
    for row, cells in zip(pivot.rows, pivot.cells, strict=True):
        if row.group != heading:
            heading = row.group
            table.add_section()
            table.add_row(f"[bold]{escape(heading)}[/bold]")
        texts = ("\n".join(_text(one, threshold) for one in cell) or "–" for cell in cells[:shown])
        table.add_row(_name(row), *texts)
    yield table
    if len(pivot.columns) > shown:
        yield f"left to the page: {len(pivot.columns) - shown} columns"


def _name(row: Heading) -> str:
    from rich.markup import escape

    note = f" [dim]({escape(row.note)})[/dim]" if row.note else ""
    return escape(row.title) + note


def _text(entry: Entry, threshold: float) -> str:
    """The entry as rich's markup."""
    from rich.markup import escape

    text = f"{entry.name}: {entry.text}" if entry.name else entry.text
    words = "" if entry.difference is None else verdict_in_words(entry.difference, threshold)
    below = words or entry.note
    shown = f"[bold]{escape(text)}[/bold]" if entry.best else escape(text)
    return f"{shown}\n{escape(below)}" if below else shown
