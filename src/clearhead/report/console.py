"""A page for the terminal: its first table and the verdict."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clearhead.report.page import Page
from clearhead.report.pivots import Entry, Pivot
from clearhead.report.statistics import verdict_in_words

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 12  # characters that a column is reckoned to take


def to_console(page: Page, width: int = 100) -> Iterator[Any]:
    """The largest table of the page's first section in sight that has one, then the verdict, the
    next command and the warnings.

    Args:
        width: of the terminal, in characters.
    """
    from rich.text import Text

    opened = (section.blocks for section in page.sections if not section.folded)
    tables = ([one for one in blocks if isinstance(one, Pivot)] for blocks in opened)
    if first := next(filter(None, tables), None):
        pivot, columns = max(first, key=lambda one: len(one.rows)), max(1, width // WIDTH - 2)
        yield _table(pivot, page.threshold, columns)
        if len(pivot.columns) > columns:
            yield f"left to the page: {len(pivot.columns) - columns} columns"
    yield Text("\n".join(["", *page.verdict]))
    yield from (Text(f"next: {command}") for command in page.next)
    yield from (Text(f"warning: {text}", style="yellow") for text in page.warnings)


def _table(pivot: Pivot, threshold: float, columns: int) -> "Table":
    """As many columns of a table; differences are judged by the `threshold` of the page."""
    from rich.markup import escape
    from rich.table import Table

    def text(entry: Entry) -> str:
        words = entry.difference and verdict_in_words(entry.difference, threshold)
        shown = f"{entry.name}: {entry.text}" if entry.name else entry.text
        return "\n".join(filter(None, (escape(shown), escape(words or entry.note))))

    table = Table(title=escape(pivot.title), title_justify="left", title_style="bold")
    table.add_column(escape(pivot.corner), overflow="fold")
    for column in pivot.columns[:columns]:
        names = (column.group, column.title, f"({column.note})" if column.note else "")
        table.add_column(escape("\n".join(filter(None, names))), justify="right", overflow="fold")
    heading = ""
    for row, cells in zip(pivot.rows, pivot.cells, strict=True):
        if row.group != heading:
            heading = row.group
            table.add_section()
            table.add_row(f"[bold]{escape(heading)}[/bold]")
        note = f" [dim]({escape(row.note)})[/dim]" if row.note else ""
        texts = ("\n".join(map(text, cell)) or "–" for cell in cells[:columns])
        table.add_row(escape(row.title) + note, *texts)
    return table
