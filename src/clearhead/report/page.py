"""A self-contained HTML page, which makes no network request and runs no code from data."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.records.intervals import LEVEL
from clearhead.records.runs import Records
from clearhead.report import statistics, style
from clearhead.report.pivots import Entry, Pivot

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table

WIDTH = 12  # characters that a column of a terminal is reckoned to take

# Scripts run only by their hash, so that no text of a record can ever become one. Plotly writes
# styles at run time and draws heat-maps as data: images.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(kw_only=True)
class Panel:
    """A figure with its own heading; consecutive ones of the same shape, "curve" or "cells" (a
    small heat-map), are shown side by side. The `id` of its element is given by `render`."""

    title: str
    figure: "go.Figure"
    note: str = ""
    shape: str = "curve"
    id: str = ""


class Fold(NamedTuple):
    """Lines of fixed width, that a reader may open."""

    summary: str
    text: str


class Facts(NamedTuple):
    """Names and values, such as properties of each model; a command is shown verbatim."""

    facts: Mapping[str, Sequence[str]]


Block = Pivot | Panel | Fold | Facts


@dataclass
class Section:
    """A title, blocks (None is left out), a reading aid, and the answer; of a `folded` one a reader
    sees title and answer, and opens the rest."""

    name: str
    title: str
    blocks: Iterable[Block | None]
    caption: str = ""
    answer: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        self.blocks = [block for block in self.blocks if block is not None]


@dataclass(kw_only=True)
class Page:
    """Everything a page shows, before it is markup. `next` are commands that act on the verdict;
    `script` is JavaScript of this page alone, which finds `data` in the page's data and `late`
    (JSON of any size, parsed by itself) in the element of that name."""

    title: str
    kicker: str
    records: Records = field(default_factory=lambda: Records(runs=()))
    verdict: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    script: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    late: Any = None

    @cached_property
    def looks(self) -> dict[str, style.Look]:
        """Styles of the arms, the same in every figure and table."""
        return style.looks(self.records.arms())

    def add(self, sections: Iterable[Section]) -> None:
        """Add the sections that are not empty."""
        self.sections += [section for section in sections if section.blocks]

    def blocks(self) -> Iterator[Block]:
        """The blocks of all sections."""
        return (block for section in self.sections for block in section.blocks if block)

    @cached_property
    def differences(self) -> list[statistics.Difference]:
        """Every difference that any of the tables shows."""
        rows = (row for block in self.blocks() if isinstance(block, Pivot) for row in block.cells)
        entries = (entry for row in rows for cell in row for entry in cell)
        return [entry.difference for entry in entries if entry.difference is not None]

    @cached_property
    def threshold(self) -> float:
        """The largest p of a difference that holds among all of the page."""
        return statistics.threshold_of(self.differences)

    @property
    def account(self) -> str:
        """The numbers of comparisons made, decided one by one, and decided together."""
        if not (p_values := statistics.family(self.differences).values()):
            return ""
        alone, together = (sum(p <= at for p in p_values) for at in (LEVEL, self.threshold))
        return (
            f"Comparisons on this page: {len(p_values)}. Decided one by one: {alone}; together as "
            f"well, where chance makes at most {style.percent(LEVEL)} of all verdicts "
            f"(Benjamini-Hochberg): {together}."
        )


def render(page: Page) -> str:
    """The page as HTML text; the template escapes all but our own parts and JSON without markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    for panel in (block for block in page.blocks() if isinstance(block, Panel)):
        panel.id = f"figure-{len(figures) + 1}"
        figures[panel.id] = json.loads(panel.figure.to_json())
    script = resources.files("clearhead.report").joinpath("page.js").read_text("utf-8")
    plotly = [get_plotlyjs()] if figures else []  # 5 MB
    # As a browser reads them before it takes their hash.
    scripts = [text.replace("\r\n", "\n") for text in (*plotly, script + page.script)]
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    environment = Environment(
        loader=PackageLoader("clearhead.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compact = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = compact  # of `tojson`
    environment.globals.update(verdict_in_words=statistics.verdict_in_words, holds=statistics.holds)
    return environment.get_template("page.html").render(
        page=page,
        policy=_POLICY.format(scripts=hashes),
        data={"figures": figures, "dark": style.LIGHT_TO_DARK, **page.data},
        scripts=list(map(Markup, scripts)),
    )


def to_console(page: Page, width: int = 100) -> Iterator[Any]:
    """For rich: the largest table of the first section in sight that has one, as many columns as
    fit `width` characters, then the verdict, the next command and the warnings."""
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
        words = entry.difference and statistics.verdict_in_words(entry.difference, threshold)
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
