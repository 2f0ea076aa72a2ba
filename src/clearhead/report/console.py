"""A page for the terminal: its first table and the verdict."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clearhead.report.page import Page
from clearhead.report.pivots import Entry, Pivot
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

    opened = (section.blocks for section in page.sections if not section.folded)
    tables_of = ([one for one in blocks if isinstance(one, Pivot)] for blocks in opened)
    if found := next(filter(None, tables_of), None):
        yield from tables(max(found, key=lambda one: len(one.rows)), page.threshold, width)
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

    def text(entry: Entry) -> str:
        name = f"{entry.name}: " if entry.name else ""
        words = entry.difference and verdict_in_words(entry.difference, threshold)
        shown = escape(name + entry.text)
        return "\n".join(filter(None, (shown, escape(words or entry.note))))

    shown = max(1, width // WIDTH - 2)
    table = Table(title=escape(pivot.title), title_justify="left", title_style="bold")
    table.add_column(escape(pivot.corner), overflow="fold")
    for column in pivot.columns[:shown]:
        names = (column.group, column.title, f"({column.note})" if column.note else "")
        table.add_column(escape("\n".join(filter(None, names))), justify="right", overflow="fold")
    heading = ""
    for row, cells in zip(pivot.rows, pivot.cells, strict=True):
        if row.group != heading:
            heading = row.group
            table.add_section()
            table.add_row(f"[bold]{escape(heading)}[/bold]")
        note = f" [dim]({escape(row.note)})[/dim]" if row.note else ""
        texts = ("\n".join(map(text, cell)) or "–" for cell in cells[:shown])
        table.add_row(escape(row.title) + note, *texts)
    yield table
    if len(pivot.columns) > shown:
        yield f"left to the page: {len(pivot.columns) - shown} columns"
