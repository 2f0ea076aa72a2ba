"""Tables of a page for the terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clearhead.report.page import Fold, Notes, Page, Tag
from clearhead.report.pivots import Entry, Heading, Pivot
from clearhead.report.verdicts import verdict_in_words

if TYPE_CHECKING:
    from rich.table import Table

LINES = 5  # of what a page folds away
ACROSS = 4  # models side by side in one table


def to_console(page: Page) -> Iterator[Any]:
    """Everything of a page that a terminal can show: tables and notes, and the verdict last."""
    from rich.text import Text

    label = ""
    for section in page.sections:
        for block in section.blocks:
            if isinstance(block, Tag):
                label = block.label
            elif isinstance(block, Pivot):
                yield from tables(block, page.threshold, f"{label}: " if label else "")
            elif isinstance(block, Notes):
                yield from (Text(f"  {text}") for text in block.texts)
            elif isinstance(block, Fold) and block.lines:
                yield Text(block.summary, style="bold")
                yield from (Text(f"  {line}") for line in block.lines[:LINES])
        label = ""
    for finding in page.findings:
        yield Text(f"\n{finding.title}", style="bold")
        for text, note in finding.paragraphs:
            yield Text(f"  {text}" + (f" [{note}]" if note else ""))
    if page.account:
        yield Text(page.account)
    yield Text("\n" + " ".join(page.verdict))
    yield from (Text(f"warning: {text}", style="yellow") for text in page.warnings)


def tables(pivot: Pivot, threshold: float, prefix: str = "") -> "Iterator[Table]":
    """A table, as several narrow ones where its columns have groups or are many models.

    Args:
        threshold: the largest p of a difference that holds among all that are shown.
    """
    from rich.markup import escape
    from rich.table import Table

    for group, places in _parts(pivot):
        rows = [row for row in range(len(pivot.rows)) if any(pivot.cells[row][j] for j in places)]
        title = prefix + ", ".join(filter(None, (pivot.title, group)))
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        table.add_column(escape(pivot.corner), overflow="fold")
        for place in places:
            column = pivot.columns[place]
            note = f"\n({column.note})" if column.note else ""
            table.add_column(escape(column.title + note), justify="right", overflow="fold")
        heading = ""
        for row in rows:
            if pivot.rows[row].group != heading:
                heading = pivot.rows[row].group
                table.add_section()
                table.add_row(f"[bold]{escape(heading)}[/bold]", *[""] * len(places))
            cells = (pivot.cells[row][place] for place in places)
            table.add_row(
                _name(pivot.rows[row]),
                *("\n".join(_text(one, threshold) for one in cell) or "–" for cell in cells),
            )
        yield table


def _parts(pivot: Pivot) -> Iterator[tuple[str, list[int]]]:
    """Groups of columns, and of models a few at a time."""
    for group, places in pivot.groups().items():
        size = len(places) if group or not pivot.columns[0].arm else ACROSS
        for start in range(0, len(places), size):
            yield group, places[start : start + size]


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
